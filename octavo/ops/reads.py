"""What one step computes, and what it reads and writes of one group of streams: the one description
that every backend takes.

Owns ``Parts`` (of the step) and ``Reads`` (of a group), which ``runner/batch.py`` makes once per
step, and the lists that follow from them, each made when somebody first asks for it. Knows laws;
knows no plan, no kind and no backend.

A step brings *entries*: for every token that it computes, something is made for the group's
streams, and it is stored ahead of all reads, behind them, or not at all. And it has *queries*,
which are at positions of these tokens and see what the law says. Mostly each entry has one query.
Where a step computes tokens that nobody asks about, there are fewer; the entries are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.base import NO_PAGE
from octavo.spec.law import Law

T = TypeVar("T")


def on_device(values: np.ndarray | Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def positions_of(start: np.ndarray, start_loc: np.ndarray) -> np.ndarray:
    """Consecutive positions of R requests from ``start`` [R] on, one request after another."""
    counts = np.diff(start_loc)
    return np.arange(start_loc[-1]) + np.repeat(start - start_loc[:-1], counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a step computes of R requests: E entries and Q queries, one request after another.

    start: int64 [R], the position of a request's first entry; those before it are its past.
    entry_start_loc: int64 [R + 1]; request i's entries are ``[entry_start_loc[i],
        entry_start_loc[i + 1])``, at consecutive positions.
    query_start_loc: int64 [R + 1], its queries likewise. query_positions: int64 [Q], ascending
        within a request, each that of one of its entries.
    """

    start: np.ndarray
    entry_start_loc: np.ndarray
    query_start_loc: np.ndarray
    query_positions: np.ndarray
    device: torch.device

    @classmethod
    def of(cls, start: np.ndarray, start_loc: np.ndarray, device: torch.device | str) -> Parts:
        """Every entry has its query."""
        start, start_loc = start.astype(np.int64), start_loc.astype(np.int64)
        return cls(
            start=start,
            entry_start_loc=start_loc,
            query_start_loc=start_loc,
            query_positions=positions_of(start, start_loc),
            device=torch.device(device),
        )

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.start)

    @property
    def num_entries(self) -> int:
        """E."""
        return int(self.entry_start_loc[-1])

    @cached_property
    def stop(self) -> np.ndarray:
        """int64 [R], the position behind a request's last entry."""
        return self.start + np.diff(self.entry_start_loc)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [E], of the entries, on the device."""
        if len(self.query_positions) == self.num_entries:
            return self.queries
        return on_device(positions_of(self.start, self.entry_start_loc), self.device)

    @cached_property
    def queries(self) -> Tensor:
        """int64 [Q], ``query_positions`` on the device."""
        return on_device(self.query_positions, self.device)

    @cached_property
    def query_requests(self) -> Tensor:
        """int64 [Q], the request of every query."""
        counts = np.diff(self.query_start_loc)
        return on_device(np.repeat(np.arange(self.num_requests), counts), self.device)

    @cached_property
    def singles(self) -> np.ndarray:
        """Requests of one query."""
        return np.flatnonzero(np.diff(self.query_start_loc) == 1)

    @cached_property
    def single_queries(self) -> Tensor:
        """int64, the queries of ``singles``."""
        return on_device(self.query_start_loc[self.singles], self.device)

    @cached_property
    def longs(self) -> list[int]:
        """Requests of several queries."""
        return np.flatnonzero(np.diff(self.query_start_loc) > 1).tolist()

    def queries_of(self, request: int) -> slice:
        """A request's queries among all."""
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Writes:
    """Entries to store: ``entries[i]`` of the step goes to row ``rows[i]`` of page ``pages[i]``.
    int64 [W] each.
    """

    entries: Tensor
    pages: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """What lies in pages, of that which each request's part needs before its own, one request after
    another.

    pages, rows, positions: int64 [P]. start_loc: R + 1 places; request i's are ``[start_loc[i],
        start_loc[i + 1])``, ascending by position.
    """

    pages: Tensor
    rows: Tensor
    positions: Tensor
    start_loc: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Closed:
    """The entries of ``stride`` tokens each that the step completes, one request after another.

    numbers, requests: int64 [C]; entry e covers its request's tokens ``[e * stride, (e + 1) *
        stride)``. writes: those that are stored; its ``entries`` are places among these.
    """

    numbers: Tensor
    requests: Tensor
    writes: Writes


class Places:
    """Rows of single tokens in [P + E, ...]: what each request has behind it, then the step's
    own.
    """

    def __init__(self, reads: Reads) -> None:
        parts, past = reads.parts, reads.past.start_loc
        self._starts = on_device(parts.start, parts.device)
        self._ends = on_device(past[1:], parts.device)
        self._own = on_device(parts.entry_start_loc[:-1] + past[-1], parts.device)

    def of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Rows of tokens at ``positions`` of ``requests``, int64 of shapes that broadcast; each
        must be there.
        """
        behind = positions - self._starts[requests]
        return torch.where(behind < 0, self._ends[requests], self._own[requests]) + behind


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """What a step reads and writes of one group.

    table: int32 [table rows, N], the page of every block, a row per request at ``rows`` (int64
        [R]).
        fixed, turning: block b has column b below ``fixed`` and ``fixed + (b - fixed) % turning``
        behind, or b everywhere (None). block_tokens: tokens of a block.
    pages, page_rows: int [E], where each entry is stored; page ``NO_PAGE`` where it is not.
    fresh: bool [R]. False: the request's entries are stored ahead of all reads, and read from
        there.
        True: they are stored behind all reads, since a page may be read as one block and written as
        another; queries see them as the step brings them.
    """

    parts: Parts
    law: Law
    table: np.ndarray
    rows: np.ndarray
    fixed: int | None
    turning: int
    block_tokens: int
    pages: np.ndarray
    page_rows: np.ndarray
    fresh: np.ndarray
    made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, make: Callable[[Reads], T]) -> T:
        """``make(reads)``, the first time that somebody asks in this step: what backends and layers
        derive.
        """
        found = self.made.get(make)
        if found is None:
            found = self.made[make] = make(self)
        return found

    def columns(self, blocks: np.ndarray) -> np.ndarray:
        """Table columns of blocks."""
        if self.fixed is None:
            return blocks
        behind = self.fixed + (blocks - self.fixed) % max(self.turning, 1)
        return np.where(blocks < self.fixed, blocks, behind)

    def find(self, requests: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pages and rows of tokens at ``positions`` of ``requests``, which must be there."""
        blocks, rows = np.divmod(positions, self.block_tokens)
        return self.table[self.rows[requests], self.columns(blocks)], rows

    @cached_property
    def first(self) -> np.ndarray:
        """int64 [Q], the first position that each query sees behind the law's prefix."""
        return np.ascontiguousarray(self.law.first(self.parts.query_positions), dtype=np.int64)

    @cached_property
    def table_tensor(self) -> Tensor:
        """``table`` on the device."""
        return torch.from_numpy(self.table).to(self.parts.device)

    @cached_property
    def rows_tensor(self) -> Tensor:
        """int64 [R], ``rows`` on the device."""
        return on_device(self.rows, self.parts.device)

    @cached_property
    def query_rows(self) -> Tensor:
        """int64 [Q], the table row of every query's request."""
        return self.rows_tensor[self.parts.query_requests]

    @cached_property
    def _late(self) -> np.ndarray:
        return np.repeat(self.fresh, np.diff(self.parts.entry_start_loc))

    @cached_property
    def _is_stored(self) -> np.ndarray:
        return self.pages != NO_PAGE

    @cached_property
    def before(self) -> Writes:
        """Entries stored ahead of all reads."""
        return self._writes(self._is_stored & ~self._late)

    @cached_property
    def after(self) -> Writes:
        """Entries stored behind all reads."""
        return self._writes(self._is_stored & self._late)

    @cached_property
    def stored(self) -> Writes:
        """``before`` and ``after`` together, ascending by entry."""
        return self._writes(self._is_stored)

    def _writes(self, chosen: np.ndarray) -> Writes:
        entries, device = np.flatnonzero(chosen), self.parts.device
        return Writes(
            entries=on_device(entries, device),
            pages=on_device(self.pages[entries], device),
            rows=on_device(self.page_rows[entries], device),
        )

    @cached_property
    def past(self) -> Past:
        """What every request needs before its part. It lies in pages until something is stored
        behind the reads.
        """
        start, device = self.parts.start, self.parts.device
        front = start if self.law.prefix is None else np.minimum(self.law.prefix, start)
        low = np.clip(self.law.first(start), front, start)
        counts = front + start - low
        start_loc = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(start_loc[-1]) - np.repeat(start_loc[:-1], counts)
        behind = places >= np.repeat(front, counts)
        positions = places + np.repeat(low - front, counts) * behind
        pages, rows = self.find(np.repeat(np.arange(len(start)), counts), positions)
        return Past(
            pages=on_device(pages, device),
            rows=on_device(rows, device),
            positions=on_device(positions, device),
            start_loc=start_loc,
        )

    @property
    def places(self) -> Places:
        """Where single tokens are in ``CacheView.roll``."""
        return self.once(Places)

    def closed(self, stride: int) -> Closed:
        """Entries of ``stride`` tokens that the step completes. Blocks cut none of them."""
        key = ("closed", stride)
        if key not in self.made:
            self.made[key] = self._close(stride)
        found: Closed = self.made[key]
        return found

    def _close(self, stride: int) -> Closed:
        assert self.block_tokens % stride == 0, "blocks cut no entry"
        parts = self.parts
        first, stop = parts.start // stride, parts.stop // stride
        counts = stop - first
        start_loc = np.concatenate(([0], np.cumsum(counts)))
        numbers = positions_of(first, start_loc)
        requests = np.repeat(np.arange(len(first)), counts)
        last = (numbers + 1) * stride - 1 + (parts.entry_start_loc[:-1] - parts.start)[requests]
        kept = np.flatnonzero(self._is_stored[last])
        return Closed(
            numbers=on_device(numbers, parts.device),
            requests=on_device(requests, parts.device),
            writes=Writes(
                entries=on_device(kept, parts.device),
                pages=on_device(self.pages[last[kept]], parts.device),
                rows=on_device(self.page_rows[last[kept]] // stride, parts.device),
            ),
        )

    def locate(self, requests: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pages, and tokens' places in their blocks, int64, of tokens at ``positions`` of
        ``requests`` (int64 of one shape).

        For laws that let nothing go. What lies at negative positions is the request's first entry.
        """
        assert self.law.prefix is None, (
            "only a law that lets nothing go has every block in a column of its own"
        )
        positions = positions.clamp(min=0)
        pages = self.table_tensor[self.rows_tensor[requests], positions // self.block_tokens]
        return pages.long(), positions % self.block_tokens
