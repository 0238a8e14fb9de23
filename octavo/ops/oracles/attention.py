"""Attention over pages, slowly: one query, head and entry at a time, in float64.

Reads entries one by one, by the table and by nothing that is derived from it, and decodes each
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.ops.latents import Heads, Queries
from octavo.ops.paged import CacheView


def _entry(view: CacheView, request: int, number: int) -> dict[str, Tensor]:
    """Parts of a request's entry ``number``, [heads, ...] each, or [...] where it has no heads."""
    reads, stored = view.reads, {}
    behind = number * view.stride - int(reads.parts.start[request])
    block, token = divmod(number * view.stride, reads.block_tokens)
    if reads.fixed is not None and block >= reads.fixed:
        block = reads.fixed + (block - reads.fixed) % reads.turning
    for name, field in view.fields.items():
        if reads.fresh[request] and behind >= 0:
            kept = view.fresh[name][int(reads.parts.entry_start_loc[request]) + behind]
        else:
            page = int(reads.table[reads.rows[request], block])
            kept = field.data[page, :, token // view.stride]
        stored[name] = kept if field.headed else kept[0]
    return view.over.entry.decode(stored, torch.float64)


def _queries(view: CacheView) -> Iterator[tuple[int, int, int]]:
    """(query, request, position) of all."""
    parts = view.reads.parts
    for request in range(parts.num_requests):
        for query in range(parts.query_start_loc[request], parts.query_start_loc[request + 1]):
            yield query, request, int(parts.query_positions[query])


def _mix(scores: Tensor, values: Tensor, sink: float | None) -> Tensor:
    """scores [L], values [L, D] -> [D], by a softmax in which a sink takes part."""
    most = max([float(scores.max()), *([] if sink is None else [sink])])
    weights = torch.exp(scores - most)
    total = weights.sum() + (0 if sink is None else math.exp(sink - most))
    return (weights[:, None] * values).sum(dim=0) / total


def attend(
    q: Tensor,
    view: CacheView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``AttendOp``."""
    made: list[list[Tensor]] = []
    known: dict[tuple[int, int], dict[str, Tensor]] = {}
    law = view.reads.law
    for query, request, position in _queries(view):
        seen = [p for start, stop in law.needs(position) for p in range(start, stop)]
        seen.append(position)
        for p in seen:
            if (request, p) not in known:
                known[request, p] = _entry(view, request, p)
        k, v = (torch.stack([known[request, p][part] for p in seen]) for part in ("k", "v"))
        heads = []
        for head, vector in enumerate(q[query].double()):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[:, group] @ vector * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            heads.append(_mix(scores, v[:, group], None if sinks is None else float(sinks[head])))
        made.append(heads)
    return torch.stack([torch.stack(heads) for heads in made])


def attend_latent(q: Queries, view: CacheView, heads: Heads) -> Tensor:
    """``AttendLatentOp``: keys and values of every entry are made, head by head."""
    made = []
    for query, request, position in _queries(view):
        seen = list(range(position + 1))
        if q.chosen is not None:
            seen = [number for number in q.chosen[query].tolist() if number >= 0]
        entries = [_entry(view, request, number) for number in seen]
        latent, rope = (torch.stack([one[part] for one in entries]) for part in ("latent", "rope"))
        rows = []
        for head, up in enumerate(heads.up.double()):
            both = latent @ up.T
            scores = both[:, : heads.nope] @ q.plain[query, head].double()
            scores = scores + rope @ q.rotated[query, head].double()
            rows.append(_mix(scores * heads.scale, both[:, heads.nope :], None))
        made.append(torch.stack(rows))
    return torch.stack(made)


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
    made = []
    for query, request, position in _queries(window):
        near = range(max(0, int(window.reads.law.first(position))), position + 1)
        entries = [_entry(window, request, number) for number in near]
        if far is not None:
            numbers = list(range((position + 1) // far.stride))
            if chosen is not None:
                numbers = [number for number in chosen[query].tolist() if number >= 0]
            entries += [_entry(far, request, number) for number in numbers]
        keys = torch.stack([next(iter(one.values())) for one in entries])
        rows = []
        for head, vector in enumerate(q[query].double()):
            sink = None if sinks is None else float(sinks[head])
            rows.append(_mix(keys @ vector * scale, keys, sink))
        made.append(torch.stack(rows))
    return torch.stack(made)


def score_and_choose(q: Tensor, weights: Tensor, view: CacheView, k: int) -> Tensor:
    """``ScoreAndChooseOp``."""
    (part,), rows = view.over.entry.parts, []
    turned = view.over.entry.match(part, q).double()
    for query, request, position in _queries(view):
        scores = []
        for number in range((position + 1) // view.stride):
            key = _entry(view, request, number)[part]
            products = [max(0.0, float(vector @ key)) for vector in turned[query]]
            scores.append(
                sum(w * p for w, p in zip(weights[query].double().tolist(), products, strict=True))
            )
        best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:k]
        rows.append((sorted(best), len(scores)))
    width = min(k, max((count for _, count in rows), default=0))
    return torch.tensor([best + [-1] * (width - len(best)) for best, _ in rows]).view(-1, width)
