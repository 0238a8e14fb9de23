"""Attention over latents and compressed entries, and the choice among these, by compiled kernels.

Owns what these take: single queries, and what gathers its choice. Chunks of prompts are plain
PyTorch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import indexer as kernels
from octavo.kernels.latent import Near, latent_attention
from octavo.kernels.library import TYPES
from octavo.ops.cpu.entries import paged, readable
from octavo.ops.latents import Heads, Queries
from octavo.ops.paged import CacheView
from octavo.ops.torch import choice, latent, sparse
from octavo.ops.torch.attention import Rule
from octavo.ops.torch.sparse import Far, Recent

TILE_SCORES = 1 << 24
"""Most scores (queries x keys) that exist at once, as long as a tile has one query."""


def attend_latent(q: Queries, view: CacheView, heads: Heads) -> Tensor:
    """``AttendLatentOp``."""
    if q.plain.dtype not in TYPES or not readable(view, pairs=False):
        return latent.attend_latent(q, view, heads)
    parts = view.reads.parts
    out = q.plain.new_empty(q.count, heads.up.shape[0], heads.size)
    singles = parts.single_queries
    if singles.numel():
        rows, seen = view.reads.query_rows[singles], parts.queries[singles] + 1
        out.index_copy_(0, singles, _absorbed(q[singles], view, rows, seen, heads))
    for request in parts.longs:
        own = parts.queries_of(request)
        out[own] = latent.by_request(q[own], view, request, heads, _gathered)
    return out


def _gathered(q: Queries, view: CacheView, requests: Tensor, heads: Heads) -> Tensor:
    """``latent.gathered``."""
    return _absorbed(q, view, view.reads.rows_tensor[requests], requests, heads)


def _absorbed(q: Queries, view: CacheView, rows: Tensor, seen: Tensor, heads: Heads) -> Tensor:
    """Any queries of the requests at table ``rows`` [n]: over their choice, or else their first
    ``seen`` [n] entries.
    """
    absorbed = heads.absorb(q.plain)
    mixed = latent_attention(
        torch.cat((absorbed, q.rotated), dim=2),
        paged(view),
        rows,
        seen if q.chosen is None else (q.chosen >= 0).sum(dim=1),
        chosen=q.chosen,
        scale=heads.scale,
        value_dim=absorbed.shape[2],
    )
    return heads.values(mixed)


def attend_sparse(
    q: Tensor,
    window: CacheView,
    far: CacheView | None,
    chosen: Tensor | None,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """``AttendSparseOp``."""
    if q.dtype not in TYPES or not (far is None or readable(far, pairs=False)):
        return sparse.attend_sparse(q, window, far, chosen, scale=scale, sinks=sinks)
    recent, parts, out = Recent.of(window, q.dtype), window.reads.parts, torch.empty_like(q)
    singles, rule = parts.single_queries, Rule(scale=scale, sinks=sinks)
    if singles.numel():
        some = None if chosen is None else chosen[singles]
        out.index_copy_(0, singles, _singles(q[singles], singles, recent, far, some, rule))
    for request in parts.longs:
        own = parts.queries_of(request)
        mine = (
            None if far is None else Far(view=far, chosen=None if chosen is None else chosen[own])
        )
        out[own] = sparse.by_request(q[own], request, recent, mine, rule)
    return out


def _singles(
    q: Tensor,
    queries: Tensor,
    recent: Recent,
    far: CacheView | None,
    chosen: Tensor | None,
    rule: Rule,
) -> Tensor:
    """q [B, H, D] of ``queries``, of one request each, with their ``chosen`` [B, k] -> [B, H,
    D].
    """
    reads, parts = recent.reads, recent.reads.parts
    positions, requests = parts.queries[queries], parts.query_requests[queries]
    behind = positions.clamp(max=reads.law.span - 1)
    places = reads.places
    first = torch.stack(
        (places.of(requests, positions - behind), places.of(requests, positions)), dim=1
    )
    count = torch.stack((behind, torch.ones_like(behind)), dim=1)
    found, visible, rows = None, None, requests
    if far is not None:
        found, rows = paged(far), far.reads.rows_tensor[requests]
        visible = (positions + 1) // far.stride if chosen is None else (chosen >= 0).sum(dim=1)
    return latent_attention(
        q,
        found,
        rows,
        visible,
        chosen=chosen,
        near=Near(rows=recent.rows, first=first, count=count),
        sinks=None if rule.sinks is None else rule.sinks.float(),
        scale=rule.scale,
        value_dim=q.shape[2],
    )


def score_and_choose(q: Tensor, weights: Tensor, view: CacheView, k: int) -> Tensor:
    """``ScoreAndChooseOp``. A query that sees no more than k is not scored."""
    if q.dtype not in TYPES or not readable(view, pairs=True):
        return choice.score_and_choose(q, weights, view, k)
    (part,) = view.over.entry.parts
    q, keys, rows = view.over.entry.match(part, q), paged(view), view.reads.query_rows
    visible = (view.reads.parts.queries + 1) // view.stride
    length = int((view.reads.parts.query_positions.max(initial=-1) + 1) // view.stride)
    chosen = visible.new_full((q.shape[0], min(k, length)), -1)
    tile, scored = max(1, TILE_SCORES // max(1, length)), visible.where(visible > k, 0)
    for first in range(0, q.shape[0], tile):
        mine = slice(first, first + tile)
        scores = kernels.index_scores(
            q[mine], weights[mine], keys, rows[mine], scored[mine], length=length
        )
        chosen[mine] = kernels.choose(scores, visible[mine], k)
    return chosen
