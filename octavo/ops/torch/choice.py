"""Index scores and the choice of the entries that sparse attention reads (DeepSeek-V3.2's lightning
indexer, and V4's), in plain PyTorch.

Owns ``score_and_choose``, and the rule of a choice. It is a function of the scores alone. Scores
are often exactly equal, since the ReLU makes zeros of all that is negative; torch's top-k breaks
such ties differently for every length, so the lowest number wins here, always.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.paged import CacheView
from octavo.ops.reads import on_device
from octavo.ops.torch.batches import run, together

TILE_PRODUCTS = 1 << 22
"""Most products (queries x heads x keys) that exist at once."""

TILE_SCORES = 1 << 23
"""Most scores (queries x keys) that exist at once, as long as a tile has one query."""

TILE_ELEMENTS = 1 << 22
"""Most elements of gathered keys at once, as long as each request has one block."""


def score_and_choose(q: Tensor, weights: Tensor, view: CacheView, k: int) -> Tensor:
    """``ScoreAndChooseOp``."""
    (part,) = view.over.entry.parts
    q, parts, stride = view.over.entry.match(part, q), view.reads.parts, view.stride
    most = int((parts.query_positions.max(initial=-1) + 1) // stride)
    out = parts.queries.new_full((q.shape[0], min(k, most)), -1)
    if not out.shape[1]:
        return out
    counts = (parts.query_positions[parts.query_start_loc[:-1][parts.singles]] + 1) // stride
    for queries, requests, last in together(parts, counts, TILE_SCORES // q.shape[1]):
        found = _choose(
            *(q[queries], weights[queries], view, on_device(requests, parts.device)),
            *(parts.queries[queries], last, k),
        )
        out[queries, : found.shape[1]] = found
    for request in parts.longs:
        own, named = parts.queries_of(request), torch.tensor([request], device=q.device)
        total = (int(parts.query_positions[own.stop - 1]) + 1) // stride
        tile = max(1, TILE_SCORES // max(1, total))
        for low in range(own.start, own.stop, tile):
            mine = slice(low, min(low + tile, own.stop))
            last = int(parts.query_positions[mine.stop - 1])
            found = _choose(q[mine], weights[mine], view, named, parts.queries[mine], last, k)
            out[mine, : found.shape[1]] = found
    return out


def _choose(
    q: Tensor,
    weights: Tensor,
    view: CacheView,
    requests: Tensor,
    positions: Tensor,
    last: int,
    k: int,
) -> Tensor:
    """``choose`` for queries at ``positions`` [n], none behind ``last``, of one request or, [n], of
    one each.
    """
    (part,), stride = view.over.entry.parts, view.stride
    total = (last + 1) // stride
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.new_empty(q.shape[0], total, dtype=wide)
    if total > k:
        each = requests.shape == positions.shape
        # Whole blocks, so that a piece begins with the entry that it is to begin with.
        block = view.reads.block_tokens // stride
        piece = block * max(1, TILE_ELEMENTS // (block * q.shape[2] * requests.shape[0]))
        for low in range(0, total, piece):
            high = min(low + piece, total)
            ends = positions if each else positions[-1:]
            keys = run(view, requests, ends, (low, high), wide)[part][:, : high - low]
            scores[:, low:high] = index_scores(q, weights, keys if each else keys[0])
    return choose(scores, (positions + 1) // stride, k)


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
