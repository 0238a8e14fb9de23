"""Index scores and the choice of the entries that sparse attention reads (DeepSeek-V3.2's lightning
indexer, and V4's).

Owns ``index_scores``, ``choose`` and ``select``, whose entries are numbered from 0, and ``pick``,
which asks them for all
requests of a step. Knows no rotation: queries and keys come as they are to be multiplied.

A choice is a function of the scores alone. Scores are often exactly equal, since the ReLU makes
zeros of all that is negative; torch's top-k breaks such ties differently for every length, so the
lowest number wins here, always.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import indexer as compiled
from octavo.kernels.entries import Paged
from octavo.ops.entries import of_bucket, of_request, paged
from octavo.ops.paged import CacheView

TILE_PRODUCTS = 1 << 22
"""Most products (queries x heads x keys) that exist at once."""

TILE_SCORES = 1 << 24
"""Most scores (queries x keys) that exist at once, as long as a tile has one query."""


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``sum_h weights[h] * relu(q[h] . key)`` of every query and key (DeepSeek-V3.2, equation 1),
    in tiles of both.

    q: [n, H, D]. weights: [n, H], all constant factors included. keys: [L, D], or [n, L, D] where
        each query has its own.
    Returns [n, L] in float32, or float64 where q is: a score for each, whoever may be chosen.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    count, heads, dim = q.shape
    total = keys.shape[-2]
    q, weights = q.to(wide), weights.to(wide)
    scores = q.new_empty(count, total)
    queries = max(1, min(count, TILE_PRODUCTS // (heads * max(1, min(total, 4096)))))
    length = max(1, TILE_PRODUCTS // (heads * queries))
    for first in range(0, count, queries):
        mine = slice(first, first + queries)
        for low in range(0, total, length):
            part = slice(low, low + length)
            if keys.dim() == 3:
                products = q[mine] @ keys[mine, part].to(wide).transpose(1, 2)
            else:
                products = (q[mine].reshape(-1, dim) @ keys[part].to(wide).T).view(
                    -1, heads, min(total - low, length)
                )
            scores[mine, part] = (weights[mine, None] @ products.relu_())[:, 0]
    return scores


def choose(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The ``k`` highest of each query's visible scores; of equal ones those with the lowest number.

    scores: [n, L], overwritten. visible: int64 [n]; query i sees entries ``[0, visible[i])``,
    whatever lies behind them. Returns int64 [n, min(k, L)]: ascending numbers, then -1 where fewer
    are visible.
    """
    total = scores.shape[1]
    width = min(k, total)
    places = torch.arange(total, device=scores.device)
    if width == total:
        return torch.where(places < visible[:, None], places, -1)
    scores.masked_fill_(places >= visible[:, None], float("-inf"))
    best, numbers = scores.topk(width, dim=-1)
    least = best[:, -1:]
    if bool(((scores >= least).sum(dim=-1) > width).logical_and_(visible > width).any()):
        numbers = _by_number(scores, least, width)
    seen = numbers < visible[:, None]
    ordered = numbers.masked_fill(~seen, total).sort(dim=-1).values
    return ordered.masked_fill_(ordered == total, -1)


def _by_number(scores: Tensor, least: Tensor, width: int) -> Tensor:
    """All above ``least`` [n, 1] and the first that equal it: [n, width] ascending, with as many as
    there are.
    """
    above, equal = scores > least, scores == least
    room = width - above.sum(dim=-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(dim=-1) <= room))
    assert bool((taken.sum(dim=-1) == width).all()), "a score is not a number"
    return taken.nonzero()[:, 1].view(-1, width)


def select(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, k: int) -> Tensor:
    """``choose`` of ``index_scores``, in tiles of queries, none of which has more keys than its
    last query sees.

    keys: [L, D]. visible must not decrease. Returns int64 [n, min(k, L)].
    """
    count, total = q.shape[0], keys.shape[0]
    chosen = visible.new_full((count, min(k, total)), -1)
    if k >= total:
        return choose(q.new_empty(count, total), visible, k)
    tile = max(1, TILE_SCORES // total)
    for first in range(0, count, tile):
        mine = slice(first, first + tile)
        seen = keys[: int(visible[mine][-1])]
        found = choose(index_scores(q[mine], weights[mine], seen), visible[mine], k)
        chosen[mine, : found.shape[1]] = found
    return chosen


def pick_compiled(
    q: Tensor, weights: Tensor, keys: Paged, rows: Tensor, visible: Tensor, k: int
) -> Tensor:
    """``choose`` of ``index_scores`` by compiled kernels, where they take it: int64 [n, min(k, most
    visible)].

    rows: int64 [n], where the table of ``keys`` has each query's request. A query that sees no more
        than k is not scored.
    """
    length = int(visible.max()) if visible.numel() else 0
    chosen = visible.new_full((q.shape[0], min(k, length)), -1)
    tile, scored = max(1, TILE_SCORES // max(1, length)), visible.where(visible > k, 0)
    for first in range(0, q.shape[0], tile):
        mine = slice(first, first + tile)
        scores = compiled.index_scores(
            q[mine], weights[mine], keys, rows[mine], scored[mine], length=length
        )
        chosen[mine] = compiled.choose(scores, visible[mine], k)
    return chosen


def pick(q: Tensor, weights: Tensor, view: CacheView, positions: Tensor, k: int) -> Tensor:
    """``select`` for every token of a step, among all tokens up to itself: int64 [T, k].

    q: [T, H, D]. weights: [T, H]. view: part ``key`` [D] of every token, the step's own included.
        positions: int64 [T].
    """
    wide, chosen = (
        torch.promote_types(q.dtype, torch.float32),
        positions.new_full((q.shape[0], k), -1),
    )
    keys = paged(view)
    if compiled.takes(q, keys):
        found = pick_compiled(q, weights, keys, view.batch.token_rows, positions + 1, k)
        chosen[:, : found.shape[1]] = found
        return chosen
    for bucket in view.batch.decodes:
        own, total = bucket.tokens, bucket.hidden.shape[1]
        asked, weighted = q[own], weights[own]
        scores = q.new_empty(own.numel(), total, dtype=wide)
        if k < total:
            for rows, entry in of_bucket(view, bucket, wide):
                scores[:, rows] = index_scores(asked, weighted, entry["key"])
        chosen[own, : min(k, total)] = choose(scores, positions[own] + 1, k)
    for request in view.batch.requests:
        part = slice(*request.query)
        seen = of_request(view, request, wide)["key"]
        found = select(q[part], weights[part], seen, positions[part] + 1, k)
        chosen[part, : found.shape[1]] = found
    return chosen
