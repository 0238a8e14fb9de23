"""The form in which a step's caches reach a layer: views of pages, and where to read and write in them.

Owns ``FieldView`` (one field of one layer over the arena) and the tensors that ``runner/batch.py`` makes once per step and
group: ``Writes``, ``RequestRead``, ``DecodeBucket``, ``GroupBatch``. Knows no plan, no law and no kind.

Rows outside the intervals a step reads may hold anything, NaN included. Whoever gathers them selects them away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.base import Interval, blocks_of


@dataclass(frozen=True, eq=False)
class FieldView:
    """One field of one stream of one layer in every page of the arena.

    data: [starts, heads, entries, ...]: index 0 is any arena unit a page can begin at, so neighbours overlap. Fields without
        a head axis have heads = 1.
    """

    data: Tensor

    def gather(self, pages: Tensor) -> Tensor:
        """Copies of whole pages: int64 [P] unit offsets -> [P, heads, entries, ...]."""
        return self.data.index_select(0, pages)

    def gather_head(self, pages: Tensor, head: int) -> Tensor:
        """Copies of one head's part of pages: int64 [P] -> [P, entries, ...]."""
        return self.data.select(1, head).index_select(0, pages)

    def write(self, pages: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store ``values[i]`` ([W, heads, ...]) in row ``rows[i]`` of page ``pages[i]`` (int64 [W] each)."""
        self.data[pages, :, rows] = values.to(self.data.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Writes:
    """Entries to store: the step's token ``tokens[i]`` goes to row ``rows[i]`` of page ``pages[i]``. int64 [W] each."""

    tokens: Tensor
    pages: Tensor
    rows: Tensor

    def store(self, view: FieldView, values: Tensor) -> None:
        """Write the chosen tokens of ``values`` [T, heads, ...]."""
        if self.tokens.numel():
            view.write(self.pages, self.rows, values.index_select(0, self.tokens))


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestRead:
    """One request that is attended by itself.

    query: its tokens within the step. start: position of the first. fresh: its own keys are not in pages yet.
    intervals: positions read from pages, ascending. pages: int64, one per block of ``blocks_of(intervals)``.
    """

    query: Interval
    start: int
    fresh: bool
    intervals: tuple[Interval, ...]
    block_tokens: int
    pages: Tensor

    def gather_head(self, view: FieldView, head: int) -> Tensor:
        """Exactly the entries of ``intervals`` (stride 1), in order: [sum of lengths, ...]. Touches no other row's value."""
        rows = view.gather_head(self.pages, head).flatten(0, 1)
        if len(self.intervals) == 1:
            start = self.intervals[0][0] % self.block_tokens
            return rows[start : start + self.intervals[0][1] - self.intervals[0][0]]
        rank = {block: place for place, block in enumerate(blocks_of(self.intervals, self.block_tokens))}
        parts = []
        for start, stop in self.intervals:
            first = rank[start // self.block_tokens] * self.block_tokens + start % self.block_tokens
            parts.append(rows[first : first + stop - start])
        return torch.cat(parts) if parts else rows[:0]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBucket:
    """Requests of one token each whose contexts are about equally long, all of it in pages.

    tokens: int64 [B], places in the step. pages: int64 [B, N], short rows repeat a page of their own.
    hidden: bool [B, N * block_tokens], True at rows that are not to be read. hidden_page, hidden_row: the same as int64 indices
        into B * N pages and their rows.
    """

    tokens: Tensor
    pages: Tensor
    hidden: Tensor
    hidden_page: Tensor
    hidden_row: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupBatch:
    """One group's part of a step. ``before`` is written ahead of all reads, ``after`` behind them."""

    before: Writes
    after: Writes
    decodes: Sequence[DecodeBucket]
    requests: Sequence[RequestRead]


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """What a layer sees of one of its streams in one step: its fields by name, and where to read and write.

    Where layers share a stream, the ``first`` makes the step's entries and leaves them in ``fresh``, the same mapping for all
    of them; the ``last`` does the writing behind the reads, since a page that is written may still be read by those between.
    """

    fields: Mapping[str, FieldView]
    batch: GroupBatch
    fresh: dict[str, Tensor] = field(default_factory=dict)
    first: bool = True
    last: bool = True

    def begin(self, **entries: Tensor) -> dict[str, Tensor]:
        """The step's entries by field, [T, heads, ...], as the cache will hold them; the first layer gives them.

        What is fresh passes through the cache's dtype like what is not, so that chunking never shows.
        """
        if self.first:
            self.fresh.update({name: made.to(self.fields[name].data.dtype) for name, made in entries.items()})
            for name, made in self.fresh.items():
                self.batch.before.store(self.fields[name], made)
        return dict(self.fresh)

    def end(self) -> None:
        """Store what is written behind all reads; nothing is left in ``fresh`` then."""
        if self.last:
            for name, made in self.fresh.items():
                self.batch.after.store(self.fields[name], made)
            self.fresh.clear()
