"""How plain PyTorch cuts a group's reads: single queries with about equally long contexts together,
everything else request by request.

Owns the cuts, made once per step and group. Knows nothing of what is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.base import Interval, blocks_of, ceil_div
from octavo.ops.paged import CacheView
from octavo.ops.reads import Parts, Reads, on_device

BUCKET_FILL = 0.75
"""A query joins a bucket while its own blocks are at least this share of the bucket's longest row.
"""

BUCKET_TOKENS = 1 << 16
"""Most gathered tokens of one bucket, so that one head's copy stays near the caches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """B requests of one query each whose contexts are about equally long, all of it in pages.

    queries: int64 [B]. pages: int64 [B, N], short rows repeat a page of their own. hidden: bool [B,
    N * block_tokens], True at rows that are not to be read. hidden_page, hidden_row: the same as
    int64 indices into B * N pages and their rows.
    """

    queries: Tensor
    pages: Tensor
    hidden: Tensor
    hidden_page: Tensor
    hidden_row: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestRead:
    """One request that is attended by itself.

    queries: its queries among all. positions: int64 [n], of these. fresh: its own entries, as the
        step brings them, or None where they are read from pages. start: position of the first of
        them. intervals: positions read from pages, ascending. pages: int64, one per block of
        ``blocks_of(intervals)``.
    """

    request: int
    queries: slice
    positions: np.ndarray
    start: int
    fresh: slice | None
    intervals: tuple[Interval, ...]
    block_tokens: int
    pages: Tensor

    @property
    def seen(self) -> tuple[Interval, ...]:
        """Positions of all that is read, the fresh ones last."""
        if self.fresh is None:
            return self.intervals
        return (*self.intervals, (self.start, self.start + self.fresh.stop - self.fresh.start))

    def read(self, view: CacheView, part: str, head: int, dtype: torch.dtype) -> Tensor:
        """Exactly the entries of ``seen`` (stride 1), in order: [L, ...] of a head. Touches no
        other row's value.
        """
        rows = view.over.by_head(part, self.pages, head, dtype).flatten(0, 1)
        rank = {
            block: place for place, block in enumerate(blocks_of(self.intervals, self.block_tokens))
        }
        parts = []
        for start, stop in self.intervals:
            first = rank[start // self.block_tokens] * self.block_tokens + start % self.block_tokens
            parts.append(rows[first : first + stop - start])
        if self.fresh is not None:
            made = {
                name: view.fresh[name][self.fresh, head] for name in view.over.entry.fields_of(part)
            }
            parts.append(view.over.entry.decode_part(part, made, dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else rows[:0]


def union(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """The same positions as ascending, disjoint intervals that do not touch."""
    merged: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _together(reads: Reads) -> np.ndarray:
    """Which requests are attended together. Laws that keep a prefix read from two places, which a
    bucket's one run of blocks cannot say.
    """
    single = np.diff(reads.parts.query_start_loc) == 1
    return single & ~reads.fresh if not reads.law.prefix else np.zeros_like(single)


def buckets(reads: Reads) -> Sequence[Bucket]:
    """Requests of one query that are attended together."""
    return reads.once(_buckets)


def requests(reads: Reads) -> Sequence[RequestRead]:
    """All others that have queries."""
    return reads.once(_requests)


def _requests(reads: Reads) -> list[RequestRead]:
    asked = np.diff(reads.parts.query_start_loc) > 0
    return [_request(reads, i) for i in np.flatnonzero(asked & ~_together(reads)).tolist()]


def _request(reads: Reads, i: int) -> RequestRead:
    parts, queries = reads.parts, reads.parts.queries_of(i)
    positions = parts.query_positions[queries]
    start, low, stop = int(parts.start[i]), int(positions[0]), int(positions[-1]) + 1
    seen = union((*reads.law.needs(low), (low, stop)))
    fresh = None
    if reads.fresh[i]:
        seen = union([(a, min(b, start)) for a, b in seen])
        begin = int(parts.entry_start_loc[i])
        fresh = slice(begin, begin + stop - start)
    blocks = np.asarray(blocks_of(seen, reads.block_tokens), dtype=np.int64)
    return RequestRead(
        request=i,
        queries=queries,
        positions=positions,
        start=start,
        fresh=fresh,
        intervals=seen,
        block_tokens=reads.block_tokens,
        pages=on_device(reads.table[reads.rows[i], reads.columns(blocks)], parts.device),
    )


def _buckets(reads: Reads) -> list[Bucket]:
    which, size = np.flatnonzero(_together(reads)), reads.block_tokens
    queries = reads.parts.query_start_loc[:-1][which]
    stop, first = reads.parts.query_positions[queries] + 1, np.maximum(reads.first[queries], 0)
    count = -(-stop // size) - first // size
    order = np.argsort(-count, kind="stable")
    found, low = [], 0
    while low < which.size:
        longest = int(count[order[low]])
        fitting = int(np.searchsorted(-count[order], -BUCKET_FILL * longest, side="right"))
        high = min(fitting, low + max(1, BUCKET_TOKENS // (longest * size)))
        mine = order[low:high]
        found.append(_bucket(reads, which[mine], first[mine], stop[mine]))
        low = high
    return found


def _bucket(reads: Reads, which: np.ndarray, first: np.ndarray, stop: np.ndarray) -> Bucket:
    """Of requests ``which``, the one with most blocks first. They read ``[first, stop)``."""
    size, device = reads.block_tokens, reads.parts.device
    block = first // size
    count = -(-stop // size) - block
    longest = int(count[0])
    blocks = block[:, None] + np.minimum(np.arange(longest), count[:, None] - 1)
    positions = block[:, None] * size + np.arange(longest * size)
    hidden = (positions < first[:, None]) | (positions >= stop[:, None])
    rows, places = np.nonzero(hidden)
    return Bucket(
        queries=on_device(reads.parts.query_start_loc[:-1][which], device),
        pages=on_device(reads.table[reads.rows[which][:, None], reads.columns(blocks)], device),
        hidden=torch.from_numpy(hidden).to(device),
        hidden_page=on_device(rows * longest + places // size, device),
        hidden_row=on_device(places % size, device),
    )


def together(
    parts: Parts, costs: np.ndarray, most: int
) -> Iterator[tuple[Tensor, np.ndarray, int]]:
    """``parts.singles`` in parts of about equal cost: (their queries, int64 [B], their requests,
    the last position of any of them).

    costs: of each of them. A part has one, or costs at most ``most`` if each of it cost as much as
        the dearest.
    """
    order, low = np.argsort(-costs, kind="stable"), 0
    queries = parts.query_start_loc[:-1][parts.singles]
    positions = parts.query_positions[queries]
    while low < order.size:
        dearest = max(1, int(costs[order[low]]))
        fitting = int(np.searchsorted(-costs[order], -BUCKET_FILL * dearest, side="right"))
        mine = order[low : min(max(fitting, low + 1), low + max(1, most // dearest))]
        yield (
            on_device(queries[mine], parts.device),
            parts.singles[mine],
            int(positions[mine].max()),
        )
        low += mine.size


def run(
    view: CacheView, requests: Tensor, last: Tensor, entries: Interval, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Entries by number of B requests, [B, n, ...] of each part, gathered as whole pages, under a
    law that lets nothing go. Those behind ``last`` [B], positions, may hold anything.

    entries: what is wanted; the result begins with the block in which the interval begins, and ends
        with one.
    """
    size, stride = view.reads.block_tokens, view.stride
    blocks = torch.arange(
        entries[0] * stride // size, ceil_div(entries[1] * stride, size), device=last.device
    )
    inside = torch.minimum(blocks * size, last[:, None])
    pages, _ = view.reads.locate(requests[:, None].expand_as(inside), inside)
    return {
        part: view.over.by_head(part, pages.flatten(), 0, dtype)
        .unflatten(0, pages.shape)
        .flatten(1, 2)
        for part in view.over.entry.parts
    }
