"""Softmax attention over paged keys and values, for prefill chunks and decodes in one call:
compiled, or in plain torch.

Owns ``attend``, and what it does in torch where ``octavo.kernels`` has nothing for device or dtype:
decodes gather pages of about equally long contexts together and multiply per K/V head; prefill runs
in query tiles, so that no score matrix outgrows ``TILE_SCORES``. ``ops/reference.py`` says what is
right. torch's own scaled_dot_product_attention is not used: on CPU it reads decode contexts many
times slower than plain matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.base import Interval
from octavo.kernels.attention import paged_attention, takes
from octavo.ops.paged import CacheView, DecodeBucket, RequestRead
from octavo.spec.law import Law

TILE_QUERIES = 256
"""Most queries of one prefill tile."""

TILE_SCORES = 1 << 23
"""Most scores (queries x heads of one K/V head x keys) of one prefill tile, as long as a tile keeps
16 queries.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """How scores become weights.

    law: which keys a query sees, of those up to its own position. scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap). sinks: [query heads] logits that
            take part in the softmax and carry no value.
    """

    law: Law
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    view: CacheView,
    *,
    law: Law,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one step's tokens, and the storing of their keys and values.

    q: [T, Hq, D]; k, v: [T, Hkv, D], the step's own, or None where another layer has made them;
    fields ``k`` and ``v`` of ``view`` hold the past. Returns [T, Hq, D] in q's dtype. Tokens of
    ``batch.before`` are stored ahead of all reads, those of ``batch.after`` behind them, because a
    page may be read as one block and written as another in the same step.
    """
    rule, batch = Rule(law=law, scale=scale, softcap=softcap, sinks=sinks), view.batch
    fresh = view.begin() if k is None or v is None else view.begin(k=k, v=v)
    k, v = fresh["k"], fresh["v"]
    keys, values = view.fields["k"].data, view.fields["v"].data
    if takes(q, keys):
        logits = None if sinks is None else sinks.float()
        out = paged_attention(
            q, keys, values, k, v, batch.reads, scale=scale, softcap=softcap, sinks=logits
        )
        view.end()
        return out
    out = torch.empty_like(q)
    for bucket in batch.decodes:
        out.index_copy_(
            0, bucket.tokens, _decode(q.index_select(0, bucket.tokens), view, bucket, rule)
        )
    for request in batch.requests:
        start, stop = request.query
        out[start:stop] = _request(q[start:stop], k[start:stop], v[start:stop], view, request, rule)
    view.end()
    return out


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


def _decode(q: Tensor, view: CacheView, bucket: DecodeBucket, rule: Rule) -> Tensor:
    """q: [B, Hq, D] -> [B, Hq, D]. The law needs no mask: a bucket reads only what it reaches."""
    keys, values = view.fields["k"], view.fields["v"]
    rows, heads = q.shape[0], keys.data.shape[1]
    shared = q.shape[1] // heads
    pages, hidden = bucket.pages.flatten(), bucket.hidden.unsqueeze(1)
    out = torch.empty_like(q)
    for head in range(heads):
        mine = slice(head * shared, (head + 1) * shared)
        key = keys.gather_head(pages, head).view(rows, -1, q.shape[2])
        weights = weights_of(
            products(q[:, mine].to(key.dtype), key.transpose(1, 2)), hidden, rule, mine
        )
        value = values.gather_head(pages, head)
        # A weight of zero does not hide a NaN.
        value[bucket.hidden_page, bucket.hidden_row] = 0
        out[:, mine] = products(weights.to(value.dtype), value.view(rows, -1, q.shape[2])).to(
            q.dtype
        )
    return out


def _request(
    q: Tensor, k: Tensor, v: Tensor, view: CacheView, request: RequestRead, rule: Rule
) -> Tensor:
    """q: [n, Hq, D], k, v: [n, Hkv, D] of one request -> [n, Hq, D]."""
    seen = request.intervals
    if request.fresh:
        seen = (*seen, (request.start, request.start + q.shape[0]))
    positions = torch.cat([torch.arange(start, stop, device=q.device) for start, stop in seen])
    heads = k.shape[1]
    shared = q.shape[1] // heads
    out = torch.empty_like(q)
    for head in range(heads):
        mine = slice(head * shared, (head + 1) * shared)
        key, value = (
            request.gather_head(view.fields["k"], head),
            request.gather_head(view.fields["v"], head),
        )
        if request.fresh:
            key, value = torch.cat((key, k[:, head])), torch.cat((value, v[:, head]))
        out[:, mine] = _tiles(q[:, mine], key, value, request.start, seen, positions, rule, mine)
    return out


def count_below(intervals: tuple[Interval, ...], position: int) -> int:
    """How many positions of ascending ``intervals`` are below ``position``."""
    return sum(min(max(position - start, 0), stop - start) for start, stop in intervals)


def _span(law: Law, seen: tuple[Interval, ...], start: int, stop: int) -> tuple[int, int]:
    """Which of the keys at ``seen`` queries ``[start, stop)`` can see at all."""
    low = 0 if law.prefix != 0 else count_below(seen, int(law.first(start)))
    return low, count_below(seen, stop)


def hidden_keys(law: Law, positions: Tensor, start: int, stop: int) -> Tensor:
    """Bool [stop - start, L]: True where a query at ``[start, stop)`` must not see the key at
    ``positions`` [L].
    """
    where = np.arange(start, stop)
    hidden = positions > torch.from_numpy(where).to(positions.device)[:, None]
    if law.prefix is None:
        return hidden
    reach = torch.from_numpy(np.asarray(law.first(where))).to(positions.device)[:, None]
    return hidden | ((positions < reach) & (positions >= law.prefix))


def _tiles(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    seen: tuple[Interval, ...],
    positions: Tensor,
    rule: Rule,
    head: slice,
) -> Tensor:
    """One K/V head, tile by tile. q: [n, G, D]; key, value: [L, D] at ``positions`` [L] -> [n, G,
    D].
    """
    out = torch.empty_like(q)
    total, shared, dim = q.shape
    tile = max(16, min(TILE_QUERIES, TILE_SCORES // max(1, shared * key.shape[0])))
    for first in range(0, total, tile):
        last = min(first + tile, total)
        low, high = _span(rule.law, seen, start + first, start + last)
        hidden = hidden_keys(rule.law, positions[low:high], start + first, start + last)
        part = q[first:last].transpose(0, 1).reshape(-1, dim).to(key.dtype)
        scores = (part @ key[low:high].T).view(shared, last - first, high - low)
        weights = weights_of(scores.transpose(0, 1), hidden[:, None], rule, head)
        mixed = weights.transpose(0, 1).reshape(-1, high - low).to(value.dtype) @ value[low:high]
        out[first:last] = mixed.view(shared, last - first, dim).transpose(0, 1).to(q.dtype)
    return out
