"""Attention over a window of single tokens and over entries of several tokens each (DeepSeek-V4),
in plain PyTorch.

Owns ``attend_sparse``: one softmax over a window, far entries and a sink. An entry is key and value
at once. Knows no projection and no rotation: entries come as the cache keeps them.

Single queries are taken together and gather their window and their chosen entries only. A request
of several runs in tiles of queries, with the window as a slice and the entries dense with a mask or
gathered per query, whichever is less (``COPY``). Nothing outlives its tile but the entries of one
request that all tiles read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.paged import CacheView
from octavo.ops.reads import Reads, on_device
from octavo.ops.torch.attention import Rule, hidden_keys, products, weights_of
from octavo.ops.torch.batches import run, together

TILE_QUERIES = 256
"""Most queries of one tile."""

TILE_SCORES = 1 << 23
"""Most scores (queries x heads x keys) of a tile, as long as it has one query."""

TILE_ELEMENTS = 1 << 22
"""Most elements of gathered entries of a tile, as long as it has one query."""

COPY = 80
"""Work of gathering an entry for one query, in heads that multiply it. Queries that chose k of n
entries gather them where ``k * (heads + COPY) < n * heads``; else their tile reads all n, at most
``(1 + COPY / heads) k``, and hides some.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recent:
    """Entries of single tokens, rows [P + E, D] by ``reads.places``."""

    rows: Tensor
    reads: Reads

    @classmethod
    def of(cls, window: CacheView, dtype: torch.dtype) -> Recent:
        """What a window's requests have behind them, and the step's own."""
        (past,), (own,) = window.past(dtype).values(), window.own(dtype).values()
        return cls(rows=torch.cat((past, own)), reads=window.reads)

    def of_request(self, request: int) -> tuple[Tensor, int]:
        """All there is of one request, ascending: [L, D], and the position of the first."""
        cuts, own = self.reads.past.start_loc, self.reads.parts.entry_start_loc
        past = self.rows[cuts[request] : cuts[request + 1]]
        fresh = self.rows[cuts[-1] + own[request] : cuts[-1] + own[request + 1]]
        return torch.cat((past, fresh)), int(self.reads.parts.start[request]) - past.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Far:
    """Entries of ``stride`` tokens each, all in pages, the step's own included.

    chosen: int64 [n, k], those that each query reads, -1 behind the last; None: all that it sees.
    """

    view: CacheView
    chosen: Tensor | None

    def __getitem__(self, part: slice | Tensor) -> Far:
        return Far(view=self.view, chosen=None if self.chosen is None else self.chosen[part])

    @property
    def stride(self) -> int:
        """Tokens of an entry."""
        return self.view.stride

    def width(self, position: int) -> int:
        """How many entries the query at ``position`` reads at most."""
        count = (position + 1) // self.stride
        return count if self.chosen is None else min(count, self.chosen.shape[1])

    def run(self, requests: Tensor, last: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The first ``count`` entries of requests, [B, count, D]. Those behind ``last`` [B],
        positions, may hold anything.
        """
        (made,) = run(self.view, requests, last, (0, count), dtype).values()
        return made[:, :count]

    def take(self, requests: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Single entries [*shape, D] of ``numbers``, negative ones zero."""
        (made,) = self.view.take(requests.expand_as(numbers), numbers, dtype).values()
        made[numbers < 0] = 0
        return made


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
    recent, rule = Recent.of(window, q.dtype), Rule(scale=scale, sinks=sinks)
    entries = None if far is None else Far(view=far, chosen=chosen)
    out, parts, span = torch.empty_like(q), window.reads.parts, window.reads.law.span
    ends = parts.query_positions[parts.query_start_loc[:-1][parts.singles]]
    costs = np.minimum(ends + 1, span)
    if entries is not None:
        costs = costs + np.array([entries.width(end) for end in ends.tolist()], dtype=np.int64)
    for queries, requests, last in together(parts, costs, TILE_ELEMENTS // q.shape[2]):
        some, named = None if entries is None else entries[queries], on_device(requests, q.device)
        out.index_copy_(0, queries, _singles(q[queries], queries, named, last, recent, some, rule))
    for request in parts.longs:
        own = parts.queries_of(request)
        mine = None if entries is None else entries[own]
        out[own] = by_request(q[own], request, recent, mine, rule)
    return out


def _singles(
    q: Tensor,
    queries: Tensor,
    requests: Tensor,
    last: int,
    recent: Recent,
    far: Far | None,
    rule: Rule,
) -> Tensor:
    """q [B, H, D] of ``queries``, one of each of ``requests``, none behind position ``last`` -> [B,
    H, D].
    """
    positions, span = recent.reads.parts.queries[queries], recent.reads.law.span
    near = positions[:, None] + torch.arange(1 - min(span, last + 1), 1, device=q.device)
    places = recent.reads.places.of(requests[:, None], near.clamp(min=0))
    keys, hidden = recent.rows[places], near < 0
    width = 0 if far is None else far.width(last)
    if far is not None and width:
        if far.chosen is None:
            visible = ((positions + 1) // far.stride)[:, None]
            unseen = torch.arange(width, device=q.device) >= visible
            more = far.run(requests, positions, width, q.dtype)
            # A weight of zero does not hide a NaN.
            more = more.masked_fill(unseen[:, :, None], 0)
        else:
            numbers = far.chosen[:, :width]
            unseen, more = numbers < 0, far.take(requests[:, None], numbers, q.dtype)
        keys, hidden = torch.cat((keys, more), dim=1), torch.cat((hidden, unseen), dim=1)
    weights = weights_of(products(q, keys.transpose(1, 2)), hidden[:, None], rule, slice(None))
    return products(weights.to(q.dtype), keys)


def by_request(q: Tensor, request: int, recent: Recent, far: Far | None, rule: Rule) -> Tensor:
    """q [n, H, D] of one request's queries -> [n, H, D]."""
    rows, first = recent.of_request(request)
    parts, law, (total, heads, dim) = recent.reads.parts, recent.reads.law, q.shape
    where, mine = parts.query_positions[parts.queries_of(request)], torch.tensor([request])
    end, mine = int(where[-1]) + 1, mine.to(q.device)
    count = 0 if far is None else end // far.stride
    chosen = None if far is None else far.chosen
    gathered = chosen is not None and chosen.shape[1] * (heads + COPY) < count * heads
    every, width = q.new_empty(0, dim), count
    if gathered and chosen is not None:
        width = chosen.shape[1]
    elif far is not None and count:
        every = far.run(mine, mine.new_tensor([end - 1]), count, q.dtype)[0]
    tile = min(TILE_QUERIES, TILE_SCORES // (heads * (law.span + TILE_QUERIES + width)))
    tile = max(1, min(tile, TILE_ELEMENTS // (width * dim)) if gathered else tile)
    out = torch.empty_like(q)
    for low in range(0, total, tile):
        own = slice(low, min(low + tile, total))
        asked, stop = where[own], int(where[own.stop - 1]) + 1
        begin = max(int(asked[0]) - law.span + 1, first)
        keys = rows[begin - first : stop - first]
        hidden = hidden_keys(law, torch.arange(begin, stop, device=q.device), asked)
        if gathered and far is not None and chosen is not None:
            numbers = chosen[own]
            more = far.take(mine, numbers, q.dtype)
            out[own] = _gathered(q[own], keys, more, torch.cat((hidden, numbers < 0), 1), rule)
        else:
            seen = 0 if far is None else stop // far.stride
            unseen = _unseen(far, own, parts.queries[parts.queries_of(request)][own], seen)
            both = torch.cat((keys, every[:seen]))
            out[own] = _dense(q[own], both, torch.cat((hidden, unseen), 1), rule)
    return out


def _unseen(far: Far | None, tile: slice, positions: Tensor, seen: int) -> Tensor:
    """bool [n, seen]: which of the first ``seen`` entries each query of a tile does not read."""
    device, count = positions.device, len(positions)
    if far is None or not seen:
        return torch.zeros(count, 0, dtype=torch.bool, device=device)
    if far.chosen is None:
        return torch.arange(seen, device=device) >= ((positions + 1) // far.stride)[:, None]
    numbers = far.chosen[tile]
    unseen = torch.ones(count, seen + 1, dtype=torch.bool, device=device)
    return unseen.scatter_(1, numbers.where(numbers >= 0, seen), False)[:, :seen]


def _dense(q: Tensor, keys: Tensor, hidden: Tensor, rule: Rule) -> Tensor:
    """q [n, H, D], keys [L, D] of all queries, hidden [n, L] -> [n, H, D]."""
    count, heads, dim = q.shape
    scores = (q.reshape(-1, dim) @ keys.T).view(count, heads, -1)
    weights = weights_of(scores, hidden[:, None], rule, slice(None))
    return (weights.to(q.dtype).view(count * heads, -1) @ keys).view(q.shape)


def _gathered(q: Tensor, keys: Tensor, more: Tensor, hidden: Tensor, rule: Rule) -> Tensor:
    """q [n, H, D], keys [L, D] of all queries, more [n, k, D] of each, hidden [n, L + k] -> [n, H,
    D].
    """
    count, heads, dim = q.shape
    near = (q.reshape(-1, dim) @ keys.T).view(count, heads, -1)
    scores = torch.cat((near, products(q, more.transpose(1, 2))), dim=2)
    first, second = (
        weights_of(scores, hidden[:, None], rule, slice(None))
        .to(q.dtype)
        .split((keys.shape[0], more.shape[1]), dim=2)
    )
    return (first.reshape(count * heads, -1) @ keys).view(q.shape) + products(second, more)
