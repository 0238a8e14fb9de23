"""Attention over a window of single tokens and over entries of several tokens each (DeepSeek-V4).

Owns where a step finds single tokens (``Recent``) and compressed entries (``Entries``), the choice
among the latter by an indexer's scores, and one softmax over all of it and a sink. An entry is key
and value at once. Knows no projection and no
rotation: entries come as the cache keeps them.

Decodes are taken together and gather their window and their chosen entries only; they, and index
scores, run compiled where ``octavo.kernels`` takes their device and dtypes. A longer part of a
request runs in tiles of queries, with the window as a slice and the entries dense with a mask or
gathered per query, whichever is less (``COPY``). Nothing outlives its tile but the entries of one
request that all tiles read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from octavo.base import Interval, ceil_div
from octavo.kernels import indexer as compiled
from octavo.kernels.latent import Near, latent_attention, takes
from octavo.ops.attention import Rule, hidden_keys, products, weights_of
from octavo.ops.codec import decode, match_queries
from octavo.ops.entries import paged
from octavo.ops.indexer import choose, index_scores, pick_compiled
from octavo.ops.paged import CacheView, Past

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
class Queries:
    """A step's tokens, one request after another. cuts: R + 1 places. starts: R first positions.

    positions, requests: int64 [T], where each token stands, and in which request.
    """

    cuts: Sequence[int]
    starts: Sequence[int]
    positions: Tensor
    requests: Tensor

    @cached_property
    def singles(self) -> np.ndarray:
        """Requests of one token."""
        return np.flatnonzero(np.diff(self.cuts) == 1)

    @cached_property
    def single_tokens(self) -> Tensor:
        """Their tokens, int64."""
        return torch.from_numpy(np.asarray(self.cuts, dtype=np.int64)[self.singles]).to(
            self.positions.device
        )

    @cached_property
    def longs(self) -> list[int]:
        """All other requests."""
        return np.flatnonzero(np.diff(self.cuts) != 1).tolist()

    def together(self, costs: np.ndarray, most: int) -> Iterator[tuple[Tensor, int]]:
        """``singles`` in parts of about equal cost: (their tokens, int64 [B]; the last position of
        any of them).

        costs: of each of them. A part has one, or costs at most ``most`` if each of it cost as much
            as the dearest.
        """
        order, low = np.argsort(-costs, kind="stable"), 0
        tokens, starts = np.asarray(self.cuts)[self.singles], np.asarray(self.starts)[self.singles]
        while low < order.size:
            part = order[low : low + max(1, most // max(1, int(costs[order[low]])))]
            yield torch.from_numpy(tokens[part]).to(self.positions.device), int(starts[part].max())
            low += part.size


class Places:
    """Rows of single tokens in [P + T, ...]: what every request's part has behind it, then the
    step's own.
    """

    def __init__(self, past: Past, queries: Queries) -> None:
        device = queries.positions.device
        self.cuts, self.queries = past.cuts, queries
        self._starts = torch.tensor(queries.starts, device=device)
        self._ends = torch.tensor(past.cuts[1:], device=device)
        self._own = torch.tensor(queries.cuts[:-1], device=device) + past.cuts[-1]

    def of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Rows of tokens at ``positions`` of ``requests``, int64 of shapes that broadcast; each
        must be there.
        """
        behind = positions - self._starts[requests]
        return torch.where(behind < 0, self._ends[requests], self._own[requests]) + behind


@dataclass(frozen=True, kw_only=True, eq=False)
class Recent:
    """Entries of single tokens, ``rows`` [P + T, D] by ``places``."""

    rows: Tensor
    places: Places

    def of_request(self, request: int) -> tuple[Tensor, int]:
        """All there is of one request, ascending: [L, D], and the position of the first."""
        cuts, own = self.places.cuts, self.places.queries.cuts
        past = self.rows[cuts[request] : cuts[request + 1]]
        fresh = self.rows[cuts[-1] + own[request] : cuts[-1] + own[request + 1]]
        return torch.cat((past, fresh)), self.places.queries.starts[request] - past.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """Entries of ``stride`` tokens each, all in pages, the step's own included. Token t sees the
    first ``(t + 1) // stride``.

    part: name of the entry. chosen: int64 [T, k], those that each of the step's tokens reads, -1
        behind the last; None: all.
    """

    view: CacheView
    stride: int
    part: str = "kv"
    chosen: Tensor | None = None

    def visible(self, positions: Tensor) -> Tensor:
        """How many entries tokens at ``positions`` see."""
        return (positions + 1) // self.stride

    def width(self, position: int) -> int:
        """How many entries the token at ``position`` reads at most."""
        count = (position + 1) // self.stride
        return count if self.chosen is None else min(count, self.chosen.shape[1])

    def run(self, requests: Tensor, last: Tensor, entries: Interval, dtype: torch.dtype) -> Tensor:
        """Entries by number, [B, n, D], gathered as whole pages. Those behind ``last`` [B],
        positions, may hold anything.

        entries: what is wanted; the result begins with the block in which the interval begins, and
            ends with one.
        """
        size = self.view.batch.block_tokens
        blocks = torch.arange(
            entries[0] * self.stride // size,
            ceil_div(entries[1] * self.stride, size),
            device=last.device,
        )
        inside = torch.minimum(blocks * size, last[:, None])
        pages, _ = self.view.batch.locate(requests[:, None].expand_as(inside), inside)
        found = {
            name: field.gather_head(pages.flatten(), 0).unflatten(0, pages.shape).flatten(1, 2)
            for name, field in self.view.fields.items()
        }
        return decode(found, dtype=dtype)[self.part]

    def take(self, requests: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Single entries [*shape, D] of ``numbers``, negative ones zero."""
        found = self.view.take(requests.expand_as(numbers), numbers, stride=self.stride)
        entries = decode(found, dtype=dtype)[self.part]
        entries[numbers < 0] = 0
        return entries


def attend(
    q: Tensor, recent: Recent, entries: Entries | None, queries: Queries, rule: Rule
) -> Tensor:
    """One softmax of each query over its window, its entries and its sink: q [T, H, D] -> [T, H,
    D].

    rule: its law says how far the window reaches.
    """
    out = torch.empty_like(q)
    if takes(q, None if entries is None else paged(entries.view, stride=entries.stride)):
        tokens = queries.single_tokens
        out.index_copy_(0, tokens, _compiled(q[tokens], tokens, recent, entries, rule))
    else:
        _decodes(q, recent, entries, queries, rule, out)
    for request in queries.longs:
        own = slice(queries.cuts[request], queries.cuts[request + 1])
        out[own] = _request(q[own], request, recent, entries, rule)
    return out


def _compiled(
    q: Tensor, tokens: Tensor, recent: Recent, entries: Entries | None, rule: Rule
) -> Tensor:
    """q [B, H, D] of ``tokens``, requests of one token each -> [B, H, D]."""
    places, queries = recent.places, recent.places.queries
    positions, requests = queries.positions[tokens], queries.requests[tokens]
    behind = positions.clamp(max=rule.law.span - 1)
    first = torch.stack(
        (places.of(requests, positions - behind), places.of(requests, positions)), dim=1
    )
    near = Near(
        rows=recent.rows, first=first, count=torch.stack((behind, torch.ones_like(behind)), dim=1)
    )
    found, chosen, visible, rows = None, None, None, requests
    if entries is not None:
        found, rows = paged(entries.view, stride=entries.stride), entries.view.batch.rows[requests]
        visible = entries.visible(positions)
        if entries.chosen is not None:
            chosen = entries.chosen[tokens]
            visible = (chosen >= 0).sum(dim=1)
    sinks = None if rule.sinks is None else rule.sinks.float()
    return latent_attention(
        q,
        found,
        rows,
        visible,
        chosen=chosen,
        near=near,
        sinks=sinks,
        scale=rule.scale,
        value_dim=q.shape[2],
    )


def _decodes(
    q: Tensor, recent: Recent, entries: Entries | None, queries: Queries, rule: Rule, out: Tensor
) -> None:
    """Fills ``out`` for requests of one token, in plain torch."""
    costs = np.minimum(np.asarray(queries.starts)[queries.singles] + 1, rule.law.span)
    if entries is not None:
        costs = costs + [
            entries.width(start) for start in np.asarray(queries.starts)[queries.singles].tolist()
        ]
    for tokens, last in queries.together(costs, TILE_ELEMENTS // q.shape[2]):
        out.index_copy_(
            0, tokens, _decode(q.index_select(0, tokens), tokens, last, recent, entries, rule)
        )


def _decode(
    q: Tensor, tokens: Tensor, last: int, recent: Recent, entries: Entries | None, rule: Rule
) -> Tensor:
    """q [B, H, D] of ``tokens``, none behind position ``last`` -> [B, H, D]."""
    queries = recent.places.queries
    positions, requests = queries.positions[tokens], queries.requests[tokens][:, None]
    near = positions[:, None] + torch.arange(1 - min(rule.law.span, last + 1), 1, device=q.device)
    keys, hidden = recent.rows[recent.places.of(requests, near.clamp(min=0))], near < 0
    width = 0 if entries is None else entries.width(last)
    if entries is not None and width:
        visible = entries.visible(positions)[:, None]
        if entries.chosen is None:
            unseen = torch.arange(width, device=q.device) >= visible
            more = entries.run(requests[:, 0], positions, (0, width), q.dtype)[:, :width]
            # A weight of zero does not hide a NaN.
            more[unseen] = 0
        else:
            numbers = entries.chosen[tokens, :width]
            unseen, more = numbers < 0, entries.take(requests, numbers, q.dtype)
        keys, hidden = torch.cat((keys, more), dim=1), torch.cat((hidden, unseen), dim=1)
    weights = weights_of(products(q, keys.transpose(1, 2)), hidden[:, None], rule, slice(None))
    return products(weights.to(q.dtype), keys)


def _request(
    q: Tensor, request: int, recent: Recent, entries: Entries | None, rule: Rule
) -> Tensor:
    """q [n, H, D] of one request's part -> [n, H, D]."""
    rows, first = recent.of_request(request)
    queries, (total, heads, dim) = recent.places.queries, q.shape
    start, mine = queries.starts[request], torch.tensor([request], device=q.device)
    count = 0 if entries is None else (start + total) // entries.stride
    chosen = (
        None
        if entries is None or entries.chosen is None
        else entries.chosen[queries.cuts[request] :][:total]
    )
    gathered = chosen is not None and chosen.shape[1] * (heads + COPY) < count * heads
    every, width = q.new_empty(0, dim), count
    if gathered and chosen is not None:
        width = chosen.shape[1]
    elif entries is not None and count:
        every = entries.run(mine, mine.new_tensor([start + total - 1]), (0, count), q.dtype)[
            0, :count
        ]
    tile = min(TILE_QUERIES, TILE_SCORES // (heads * (rule.law.span + TILE_QUERIES + width)))
    tile = max(1, min(tile, TILE_ELEMENTS // (width * dim)) if gathered else tile)
    out = torch.empty_like(q)
    for low in range(0, total, tile):
        high = min(low + tile, total)
        begin = max(start + low - rule.law.span + 1, first)
        keys = rows[begin - first : start + high - first]
        hidden = hidden_keys(
            rule.law, torch.arange(begin, start + high, device=q.device), start + low, start + high
        )
        if gathered and entries is not None and chosen is not None:
            numbers = chosen[low:high]
            more = entries.take(mine, numbers, q.dtype)
            out[low:high] = _gathered(
                q[low:high], keys, more, torch.cat((hidden, numbers < 0), dim=1), rule
            )
        else:
            seen = 0 if entries is None else (start + high) // entries.stride
            unseen = _unseen(entries, chosen, start, (low, high), seen, q.device)
            both = torch.cat((keys, every[:seen]))
            out[low:high] = _dense(q[low:high], both, torch.cat((hidden, unseen), dim=1), rule)
    return out


def _unseen(
    entries: Entries | None,
    chosen: Tensor | None,
    start: int,
    tile: Interval,
    seen: int,
    device: torch.device,
) -> Tensor:
    """bool [n, seen]: which of the first ``seen`` entries each query of a request's tile does not
    read.
    """
    low, high = tile
    if entries is None or not seen:
        return torch.zeros(high - low, 0, dtype=torch.bool, device=device)
    if chosen is None:
        visible = entries.visible(torch.arange(start + low, start + high, device=device))
        return torch.arange(seen, device=device) >= visible[:, None]
    numbers = chosen[low:high]
    unseen = torch.ones(high - low, seen + 1, dtype=torch.bool, device=device)
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


def select(q: Tensor, weights: Tensor, keys: Entries, queries: Queries, k: int) -> Tensor:
    """The ``k`` entries with the highest index scores among those that each token sees, of equal
    ones the lowest.

    q: [T, H, D]; weights: [T, H], all constant factors included; keys: index keys. Returns int64
        [T, <= k], ascending, then -1.
    """
    q, entries = match_queries(q, keys.view.fields), paged(keys.view, stride=keys.stride)
    if compiled.takes(q, entries):
        rows = keys.view.batch.rows[queries.requests]
        return pick_compiled(q, weights, entries, rows, keys.visible(queries.positions), k)
    ends = [
        start + stop - begin
        for start, begin, stop in zip(queries.starts, queries.cuts, queries.cuts[1:], strict=False)
    ]
    out = queries.positions.new_full((q.shape[0], min(k, max(ends, default=0) // keys.stride)), -1)
    if not out.shape[1]:
        return out
    counts = (np.asarray(queries.starts)[queries.singles] + 1) // keys.stride
    for tokens, last in queries.together(counts, TILE_SCORES // q.shape[1]):
        found = _choose(
            q[tokens],
            weights[tokens],
            keys,
            queries.requests[tokens],
            queries.positions[tokens],
            last,
            k,
        )
        out[tokens, : found.shape[1]] = found
    for request in queries.longs:
        low, stop = queries.cuts[request], queries.cuts[request + 1]
        mine, tile = (
            torch.tensor([request], device=q.device),
            max(1, TILE_SCORES // max(1, ends[request] // keys.stride)),
        )
        for first in range(low, stop, tile):
            own = slice(first, min(first + tile, stop))
            last = queries.starts[request] + own.stop - low - 1
            found = _choose(q[own], weights[own], keys, mine, queries.positions[own], last, k)
            out[own, : found.shape[1]] = found
    return out


def _choose(
    q: Tensor,
    weights: Tensor,
    keys: Entries,
    requests: Tensor,
    positions: Tensor,
    last: int,
    k: int,
) -> Tensor:
    """``choose`` for queries at ``positions`` [n], none behind ``last``, of one request or, [n], of
    one each.
    """
    total = (last + 1) // keys.stride
    scores = q.new_empty(q.shape[0], total, dtype=torch.promote_types(q.dtype, torch.float32))
    if total > k:
        ends = positions if requests.shape == positions.shape else positions[-1:]
        # Whole blocks, so that a piece begins with the entry that it is to begin with.
        block = keys.view.batch.block_tokens // keys.stride
        piece = block * max(1, TILE_ELEMENTS // (block * q.shape[2] * requests.shape[0]))
        for low in range(0, total, piece):
            high = min(low + piece, total)
            found = keys.run(requests, ends, (low, high), q.dtype)[:, : high - low]
            scores[:, low:high] = index_scores(
                q, weights, found if requests.shape == positions.shape else found[0]
            )
    return choose(scores, keys.visible(positions), k)
