"""Softmax attention over paged keys and values, in plain PyTorch.

Owns ``attend``, and how scores become weights. Single queries gather pages of about equally long
contexts together and multiply per K/V head; others run in query tiles, so that no score matrix
outgrows ``TILE_SCORES``. torch's own scaled_dot_product_attention is not used: on CPU it reads
decode contexts many times slower than plain matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.base import Interval
from octavo.ops.paged import CacheView
from octavo.ops.torch.batches import Bucket, RequestRead, buckets, requests
from octavo.spec.law import Law

TILE_QUERIES = 256
"""Most queries of one tile."""

TILE_SCORES = 1 << 23
"""Most scores (queries x heads of one K/V head x keys) of one tile, as long as a tile keeps 16
queries.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """How scores become weights.

    scale: factor of the scores. softcap: scores become softcap * tanh(score / softcap). sinks:
        [query heads] logits that take part in the softmax and carry no value.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(
    q: Tensor,
    view: CacheView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``AttendOp``."""
    rule = Rule(scale=scale, softcap=softcap, sinks=sinks)
    (heads, width) = view.fresh["v"].shape[1:] if view.over.plain else _shape(view)
    out = q.new_empty(q.shape[0], q.shape[1], width)
    for bucket in buckets(view.reads):
        own = bucket.queries
        out.index_copy_(0, own, _bucket(q.index_select(0, own), view, bucket, rule, heads, width))
    for request in requests(view.reads):
        own_queries = request.queries
        out[own_queries] = _request(q[own_queries], view, request, rule, heads, width)
    return out


def _shape(view: CacheView) -> tuple[int, int]:
    """K/V heads, and elements of a value."""
    own = view.own(torch.float32)["v"]
    return own.shape[1], own.shape[2]


def weights_of(scores: Tensor, hidden: Tensor | None, rule: Rule, head: slice) -> Tensor:
    """Softmax weights in float32. scores: [..., G, L] of the query heads ``head``; hidden: True
    where a key is not seen.

    Scores are selected away rather than added to, so that NaN in a hidden place has no effect.
    """
    scores = (
        scores.float().mul_(rule.scale) if scores.dtype != torch.float64 else scores * rule.scale
    )
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    if rule.sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = rule.sinks[head].to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]


def products(left: Tensor, right: Tensor) -> Tensor:
    """[B, n, m] @ [B, m, p]. torch's batched product of one bfloat16 pair is many times slower on
    CPU than the plain one.
    """
    return (left[0] @ right[0])[None] if left.shape[0] == 1 else left @ right


def _bucket(
    q: Tensor, view: CacheView, bucket: Bucket, rule: Rule, heads: int, width: int
) -> Tensor:
    """q: [B, Hq, D] -> [B, Hq, Dv]. The law needs no mask: a bucket reads only what it reaches."""
    count, shared = q.shape[0], q.shape[1] // heads
    pages, hidden = bucket.pages.flatten(), bucket.hidden.unsqueeze(1)
    out = q.new_empty(count, q.shape[1], width)
    for head in range(heads):
        mine = slice(head * shared, (head + 1) * shared)
        key = view.over.by_head("k", pages, head, q.dtype).view(count, -1, q.shape[2])
        weights = weights_of(products(q[:, mine], key.transpose(1, 2)), hidden, rule, mine)
        value = view.over.by_head("v", pages, head, q.dtype)
        # A weight of zero does not hide a NaN.
        value[bucket.hidden_page, bucket.hidden_row] = 0
        out[:, mine] = products(weights.to(q.dtype), value.view(count, -1, width))
    return out


def _request(
    q: Tensor, view: CacheView, request: RequestRead, rule: Rule, heads: int, width: int
) -> Tensor:
    """q: [n, Hq, D] of one request -> [n, Hq, Dv]."""
    seen, law = request.seen, view.reads.law
    positions = torch.cat([torch.arange(start, stop, device=q.device) for start, stop in seen])
    shared = q.shape[1] // heads
    out = q.new_empty(q.shape[0], q.shape[1], width)
    for head in range(heads):
        mine = slice(head * shared, (head + 1) * shared)
        key, value = (request.read(view, part, head, q.dtype) for part in ("k", "v"))
        tiles = _tiles(q.shape[0], shared * key.shape[0])
        for tile in tiles:
            where = request.positions[tile]
            low, high = _span(law, seen, int(where[0]), int(where[-1]) + 1)
            hidden = hidden_keys(law, positions[low:high], where)
            out[tile, mine] = _mixed(
                q[tile, mine], key[low:high], value[low:high], hidden, rule, mine
            )
    return out


def _tiles(count: int, scores: int) -> list[slice]:
    """All queries in tiles. scores: of one query."""
    size = max(16, min(TILE_QUERIES, TILE_SCORES // max(1, scores)))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def count_below(intervals: tuple[Interval, ...], position: int) -> int:
    """How many positions of ascending ``intervals`` are below ``position``."""
    return sum(min(max(position - start, 0), stop - start) for start, stop in intervals)


def _span(law: Law, seen: tuple[Interval, ...], start: int, stop: int) -> tuple[int, int]:
    """Which of the keys at ``seen`` queries at ``[start, stop)`` can see at all."""
    low = 0 if law.prefix != 0 else count_below(seen, int(law.first(start)))
    return low, count_below(seen, stop)


def hidden_keys(law: Law, positions: Tensor, queries: np.ndarray) -> Tensor:
    """Bool [n, L]: True where a query at ``queries`` [n] must not see the key at ``positions``
    [L].
    """
    hidden = positions > torch.from_numpy(queries).to(positions.device)[:, None]
    if law.prefix is None:
        return hidden
    reach = torch.from_numpy(np.asarray(law.first(queries))).to(positions.device)[:, None]
    return hidden | ((positions < reach) & (positions >= law.prefix))


def _mixed(
    q: Tensor, key: Tensor, value: Tensor, hidden: Tensor, rule: Rule, head: slice
) -> Tensor:
    """One K/V head. q: [n, G, D]; key, value: [L, D or Dv]; hidden: [n, L] -> [n, G, Dv]."""
    count, shared, dim = q.shape
    scores = (q.transpose(0, 1).reshape(-1, dim) @ key.T).view(shared, count, -1)
    weights = weights_of(scores.transpose(0, 1), hidden[:, None], rule, head)
    mixed = weights.transpose(0, 1).reshape(shared * count, -1).to(value.dtype) @ value
    return mixed.view(shared, count, -1).transpose(0, 1)
