"""Latent attention over pages in plain PyTorch: dense and sparse, single queries and chunks.

Owns ``attend_latent`` and the rule by which it computes (``way_of``). To expand is less work for
many queries, to absorb for few, since latents are wider than keys. Over a choice of entries
absorbed attention can *gather* the chosen ones alone, so that what is read does not grow with the
context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from octavo.ops.latents import Heads, Queries
from octavo.ops.paged import CacheView
from octavo.ops.reads import on_device
from octavo.ops.torch.attention import TILE_SCORES, Rule, products, weights_of
from octavo.ops.torch.batches import BUCKET_TOKENS, run, together

TILE_EXPANDED: Final = 1 << 24
"""Most elements of expanded keys and values that exist at once, as long as one head has its own."""

TILE_GATHERED: Final = 1 << 24
"""Most elements of gathered entries that exist at once, as long as a tile has one query."""

TILE_QUERIES: Final = 256
"""Most queries of one tile: keys behind a tile's last query are not multiplied."""

PIECE_TOKENS: Final = 4096
"""Most tokens of several requests that are copied at once, as long as each has one block: what is
copied is used in the caches.
"""

Way = Literal["expand", "absorb", "gather"]
Entries = dict[str, Tensor]


def way_of(heads: Heads, *, queries: int, start: int, chosen: int | None, rope: int) -> Way:
    """How ``queries`` tokens from position ``start`` on are attended to with the fewest
    multiplications, counted per head.

    With L = start + queries tokens, P pairs of a query and a token it sees, and ``u`` = nope +
    value:

    - expand: ``L rank u`` to make keys and values, and ``P (u + rope)``
    - absorb: ``queries rank u`` for queries and outputs, and ``P (2 rank + rope)``
    - gather, where each attends to ``chosen`` tokens only: ``queries (rank u + chosen (2 rank +
      rope))``

    DeepSeek-V3's sizes expand a chunk of a long prompt from 171 tokens on, and V3.2's gather for a
    chunk of 2,048 once about 7,000 tokens are there.
    """
    (_, both, rank), length = heads.up.shape, start + queries
    pairs = queries * start + queries * (queries + 1) // 2
    costs: dict[Way, int] = {
        "expand": length * rank * both + pairs * (both + rope),
        "absorb": queries * rank * both + pairs * (2 * rank + rope),
    }
    if chosen is not None and chosen < length:
        costs["gather"] = queries * (rank * both + chosen * (2 * rank + rope))
    return min(costs, key=lambda way: costs[way])


def attend_latent(q: Queries, view: CacheView, heads: Heads) -> Tensor:
    """``AttendLatentOp``."""
    parts = view.reads.parts
    out = q.plain.new_empty(q.count, heads.up.shape[0], heads.size)
    ends = parts.query_positions[parts.query_start_loc[:-1][parts.singles]] + 1
    for queries, requests, last in together(parts, ends, BUCKET_TOKENS):
        mine, named = q[queries], on_device(requests, parts.device)
        if mine.chosen is not None and mine.chosen.shape[1] <= last:
            made = gathered(mine, view, named, heads)
        else:
            made = heads.values(_piecewise(mine, view, named, parts.queries[queries], last, heads))
        out.index_copy_(0, queries, made)
    for request in parts.longs:
        own = parts.queries_of(request)
        out[own] = by_request(q[own], view, request, heads, gathered)
    return out


def _piecewise(
    q: Queries, view: CacheView, requests: Tensor, positions: Tensor, last: int, heads: Heads
) -> Tensor:
    """``_mixed`` of requests of one query, none behind ``last``, with the running maximum and sum
    of an online softmax (Milakov and Gimelshein 2018).
    """
    absorbed, rotated, size = heads.absorb(q.plain), q.rotated, view.reads.block_tokens
    wide = torch.promote_types(absorbed.dtype, torch.float32)
    best = absorbed.new_full((*absorbed.shape[:2], 1), float("-inf"), dtype=wide)
    total, mixed = torch.zeros_like(best), torch.zeros_like(absorbed, dtype=wide)
    piece = size * max(1, PIECE_TOKENS // (q.count * size))
    for low in range(0, last + 1, piece):
        high = min(low + piece, last + 1)
        entry = run(view, requests, positions, (low, high), absorbed.dtype)
        latent, rope = entry["latent"][:, : high - low], entry["rope"][:, : high - low]
        hidden = torch.arange(low, high, device=positions.device) > positions[:, None]
        # A weight of zero does not hide a NaN.
        latent = latent.masked_fill(hidden[:, :, None], 0)
        scores = products(absorbed, latent.transpose(1, 2))
        scores = scores + products(rotated, rope.transpose(1, 2))
        scores = (scores.to(wide) * heads.scale).masked_fill_(hidden[:, None], float("-inf"))
        # The first entries of every request are seen, so this is a number from the first piece on.
        higher = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        weights, kept = torch.exp(scores - higher), torch.exp(best - higher)
        total = total * kept + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * kept + products(weights.to(latent.dtype), latent)
        best = higher
    return (mixed / total).to(absorbed.dtype)


Gather = Callable[[Queries, CacheView, Tensor, Heads], Tensor]
"""As ``gathered``."""


def by_request(q: Queries, view: CacheView, request: int, heads: Heads, gather: Gather) -> Tensor:
    """All queries of one request, in the way that is least work; ``gather`` reads chosen ones."""
    parts, chosen = view.reads.parts, None if q.chosen is None else q.chosen.shape[1]
    own = parts.queries_of(request)
    positions, end = parts.queries[own], int(parts.query_positions[own.stop - 1]) + 1
    way = way_of(
        heads, queries=q.count, start=end - q.count, chosen=chosen, rope=q.rotated.shape[2]
    )
    named = torch.tensor([request], device=positions.device)
    if way == "gather":
        return gather(q, view, named.expand(q.count), heads)
    found = run(view, named, positions[-1:], (0, end), q.plain.dtype)
    entry = {part: some[0, :end] for part, some in found.items()}
    return (_expanded if way == "expand" else _absorbed)(q, entry, positions, heads)


def _mixed(absorbed: Tensor, rotated: Tensor, entry: Entries, hidden: Tensor, rule: Rule) -> Tensor:
    """Latents mixed by softmax weights: [n, H, rank] and [n, H, rope] -> [n, H, rank].

    entry: parts [L, ...] that all queries share, or [n, L, ...]. hidden: bool [n, L], True where an
        entry is not seen.
    """
    latent, rope = entry["latent"], entry["rope"]
    if latent.dim() == 3 and latent.shape[0] == 1:
        latent, rope = latent[0], rope[0]
    scores = absorbed @ latent.transpose(-1, -2) + rotated @ rope.transpose(-1, -2)
    weights = weights_of(scores, hidden[:, None], rule, slice(None))
    return weights.to(latent.dtype) @ latent


def gathered(q: Queries, view: CacheView, requests: Tensor, heads: Heads) -> Tensor:
    """Reads the chosen entries of ``requests`` [n] and no others."""
    assert q.chosen is not None
    absorbed, out, rule = heads.absorb(q.plain), [], Rule(scale=heads.scale)
    tile = max(1, TILE_GATHERED // (q.chosen.shape[1] * (absorbed.shape[2] + q.rotated.shape[2])))
    for first in range(0, q.count, tile):
        part = slice(first, first + tile)
        numbers = q.chosen[part]
        entry = view.take(requests[part, None].expand_as(numbers), numbers, absorbed.dtype)
        out.append(_mixed(absorbed[part], q.rotated[part], entry, numbers < 0, rule))
    return heads.values(torch.cat(out))


def _hidden(q: Queries, tile: slice, positions: Tensor) -> Tensor:
    """Bool [n, L]: which of the entries that a tile's last query sees its queries at ``positions``
    do not see.
    """
    where = positions[tile]
    seen = int(where[-1]) + 1
    later = torch.arange(seen, device=where.device) > where[:, None]
    if q.chosen is None:
        return later
    chosen = q.chosen[tile]
    # What pads a choice falls on a column of its own.
    mask = torch.ones(len(where), seen + 1, dtype=torch.bool, device=where.device)
    return later | mask.scatter_(1, torch.where(chosen < 0, seen, chosen), False)[:, :seen]


def _tiles(count: int, scores: int, step: Callable[[slice], Tensor]) -> Tensor:
    """``step(tile)`` of all tiles of queries, [n, ...] each. scores: of one query."""
    size = max(16, min(TILE_QUERIES, TILE_SCORES // max(1, scores)))
    return torch.cat([step(slice(low, min(low + size, count))) for low in range(0, count, size)])


def _absorbed(q: Queries, entry: Entries, positions: Tensor, heads: Heads) -> Tensor:
    """One request's chunk over its latents, parts [L, ...]."""
    absorbed, rule = heads.absorb(q.plain), Rule(scale=heads.scale)

    def step(tile: slice) -> Tensor:
        hidden = _hidden(q, tile, positions)
        seen = {name: part[: hidden.shape[1]] for name, part in entry.items()}
        return _mixed(absorbed[tile], q.rotated[tile], seen, hidden, rule)

    length = entry["latent"].shape[0]
    return heads.values(_tiles(q.count, heads.up.shape[0] * length, step))


def _expanded(q: Queries, entry: Entries, positions: Tensor, heads: Heads) -> Tensor:
    """One request's chunk over keys and values made of its latents, parts [L, ...], some heads at a
    time.
    """
    total, both, _ = heads.up.shape
    latent, rope, rule = entry["latent"], entry["rope"], Rule(scale=heads.scale)
    length = latent.shape[0]
    width = max(1, min(total, TILE_EXPANDED // (length * both)))
    out = q.plain.new_empty(q.count, total, heads.size)
    for low in range(0, total, width):
        mine = slice(low, low + width)
        up = heads.up[mine]
        made = (latent @ up.flatten(0, 1).T).view(length, -1, both).transpose(0, 1)
        keys, values = made[..., : heads.nope], made[..., heads.nope :]
        plain, rotated = q.plain[:, mine].transpose(0, 1), q.rotated[:, mine].transpose(0, 1)

        def step(
            tile: slice,
            plain: Tensor = plain,
            rotated: Tensor = rotated,
            keys: Tensor = keys,
            values: Tensor = values,
        ) -> Tensor:
            hidden = _hidden(q, tile, positions)
            seen = slice(0, hidden.shape[1])
            scores = torch.bmm(plain[:, tile], keys[:, seen].transpose(1, 2))
            scores = scores + rotated[:, tile] @ rope[seen].T
            weights = weights_of(scores, hidden, rule, slice(None))
            return torch.bmm(weights.to(values.dtype), values[:, seen]).transpose(0, 1)

        out[:, mine] = _tiles(q.count, up.shape[0] * length, step)
    return out
