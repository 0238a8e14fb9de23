"""The form in which a step's caches reach a layer: views of pages, and where to read and write in
them.

Owns ``FieldView`` (one field of one layer over the arena), and what ``runner/batch.py`` makes once
per step and group, each
part when a layer first asks for it: ``GroupBatch`` and its parts. Knows no plan, no law and no
kind.

There are three ways to use a stream, one for each manner of remembering:

- *attend* (keys and values of tokens): ``CacheView.begin`` → ``batch.decodes`` and
  ``batch.requests`` → ``CacheView.end``;
- *roll* (a bounded past that a layer reads whole: windows, open groups, states): ``CacheView.past``
  → compute → ``store``;
- *collect* (entries that stay, one per ``stride`` tokens): ``batch.closed(stride)`` →
  ``CacheView.store_entries`` → reads by ``batch.locate``.

Rows outside the intervals a step reads may hold anything, NaN included. Whoever gathers them
selects them away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from octavo.base import Interval, blocks_of
from octavo.kernels.attention import Reads
from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH


@dataclass(frozen=True, eq=False)
class FieldView:
    """One field of one stream of one layer in every page of the arena.

    data: [starts, heads, entries, ...]: index 0 is any arena unit a page can begin at, so
        neighbours overlap. Fields without a head axis have heads = 1. headed: does an entry have a
        head axis?
    """

    data: Tensor
    headed: bool = True

    def gather(self, pages: Tensor) -> Tensor:
        """Copies of whole pages: int64 [P] unit offsets -> [P, heads, entries, ...]."""
        return self.data.index_select(0, pages)

    def gather_head(self, pages: Tensor, head: int) -> Tensor:
        """Copies of one head's part of pages: int64 [P] -> [P, entries, ...]."""
        return _indexed(self.data).select(1, head).index_select(0, pages).view(self.data.dtype)

    def take(self, pages: Tensor, rows: Tensor) -> Tensor:
        """Copies of single entries: row ``rows[i]`` of page ``pages[i]``, int64 of any one shape ->
        [*shape, *entry].
        """
        found = _indexed(self.data)[pages, :, rows].view(self.data.dtype)
        return found if self.headed else found.squeeze(pages.dim())

    def write(self, pages: Tensor, rows: Tensor, values: Tensor) -> None:
        """Store ``values[i]`` ([W, heads, ...]) in row ``rows[i]`` of page ``pages[i]`` (int64 [W]
        each).
        """
        _indexed(self.data)[pages, :, rows] = _indexed(values.to(self.data.dtype))


def _indexed(values: Tensor) -> Tensor:
    """The same memory in a dtype that PyTorch can index: floats of a byte and less are bytes."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


@dataclass(frozen=True, kw_only=True, eq=False)
class Writes:
    """Entries to store: the step's token ``tokens[i]`` goes to row ``rows[i]`` of page
    ``pages[i]``. int64 [W] each.
    """

    tokens: Tensor
    pages: Tensor
    rows: Tensor

    def store(self, fields: Mapping[str, FieldView], made: Mapping[str, Tensor], ops: Ops) -> None:
        """Write the chosen tokens of what was made, [T, heads, ...] by field."""
        if self.tokens.numel():
            data = [fields[name].data for name in made]
            ops.store(data, self.pages, self.rows, list(made.values()), self.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """The entries in pages that each request's part of the step needs before its own, one request
    after another.

    pages, rows, positions: int64 [P]. cuts: R + 1 places; request i's are ``[cuts[i], cuts[i +
        1])``, ascending by position.
    """

    pages: Tensor
    rows: Tensor
    positions: Tensor
    cuts: Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Closed:
    """The entries of ``stride`` tokens each that the step completes, one request after another.

    tokens: int64 [E], the tokens that close them, by place in the step. numbers: int64 [E]; entry e
    covers the request's tokens ``[e * stride, (e + 1) * stride)``. cuts: R + 1 places; request i's
    are ``[cuts[i], cuts[i + 1])``.
    writes: those that are stored; its ``tokens`` are places among these entries.
    """

    tokens: Tensor
    numbers: Tensor
    cuts: Sequence[int]
    writes: Writes


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestRead:
    """One request that is attended by itself.

    query: its tokens within the step. start: position of the first. fresh: its own keys are not in
        pages yet.
    intervals: positions read from pages, ascending. pages: int64, one per block of
        ``blocks_of(intervals)``.
    """

    query: Interval
    start: int
    fresh: bool
    intervals: tuple[Interval, ...]
    block_tokens: int
    pages: Tensor

    def gather_head(self, view: FieldView, head: int) -> Tensor:
        """Exactly the entries of ``intervals`` (stride 1), in order: [sum of lengths, ...]. Touches
        no other row's value.
        """
        rows = view.gather_head(self.pages, head).flatten(0, 1)
        if len(self.intervals) == 1:
            start = self.intervals[0][0] % self.block_tokens
            return rows[start : start + self.intervals[0][1] - self.intervals[0][0]]
        rank = {
            block: place for place, block in enumerate(blocks_of(self.intervals, self.block_tokens))
        }
        parts = []
        for start, stop in self.intervals:
            first = rank[start // self.block_tokens] * self.block_tokens + start % self.block_tokens
            parts.append(rows[first : first + stop - start])
        return torch.cat(parts) if parts else rows[:0]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeBucket:
    """Requests of one token each whose contexts are about equally long, all of it in pages.

    tokens: int64 [B], places in the step. pages: int64 [B, N], short rows repeat a page of their
        own.
    hidden: bool [B, N * block_tokens], True at rows that are not to be read. hidden_page,
        hidden_row: the same as int64 indices into B * N pages and their rows.
    """

    tokens: Tensor
    pages: Tensor
    hidden: Tensor
    hidden_page: Tensor
    hidden_row: Tensor


class GroupBatch(ABC):
    """One group's part of a step of R requests. Every part is made when first asked for and then
    kept for all layers.

    block_tokens: tokens of a block. table: int32 [rows, N], the page of every block, a row per
        request at ``rows`` (int64 [R]).
    """

    block_tokens: int
    table: Tensor
    rows: Tensor

    @property
    @abstractmethod
    def before(self) -> Writes:
        """Tokens stored ahead of all reads of pages."""

    @property
    @abstractmethod
    def after(self) -> Writes:
        """Tokens stored behind all reads: a page may be read as one block and written as
        another.
        """

    @property
    @abstractmethod
    def stored(self) -> Writes:
        """``before`` and ``after`` together, ascending by token."""

    @property
    @abstractmethod
    def decodes(self) -> Sequence[DecodeBucket]:
        """Requests of one token that are attended together."""

    @property
    @abstractmethod
    def requests(self) -> Sequence[RequestRead]:
        """All other requests."""

    @property
    @abstractmethod
    def past(self) -> Past:
        """What every request needs before its part. In pages, at the latest, until the first token
        is stored.
        """

    @property
    @abstractmethod
    def reads(self) -> Reads:
        """What compiled kernels read, of all requests, for entries of one token."""

    @cached_property
    def token_rows(self) -> Tensor:
        """int64 [T], each token's row of the table."""
        return self.rows.repeat_interleave(self.reads.query_start.diff())

    @abstractmethod
    def closed(self, stride: int) -> Closed:
        """Entries of ``stride`` tokens that end in this step."""

    @abstractmethod
    def locate(self, requests: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pages, and tokens' places in their blocks, int64, of tokens at ``positions`` of
        ``requests`` (int64 of one shape).

        For laws that let nothing go. What lies at negative positions is the request's first entry.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """What a layer sees of one of its streams in one step: its fields by name, and where to read
    and write.

    Where layers share a stream, the ``first`` makes the step's entries and leaves them in
    ``fresh``, the same mapping for all of them; the ``last`` does the writing behind the reads,
    since a page that is written may still be read by those between.
    """

    fields: Mapping[str, FieldView]
    batch: GroupBatch
    fresh: dict[str, Tensor] = field(default_factory=dict)
    first: bool = True
    last: bool = True
    ops: Ops = TORCH

    def begin(self, **entries: Tensor) -> dict[str, Tensor]:
        """The step's entries by field, [T, heads, ...], as the cache will hold them; the first
        layer gives them.

        What is fresh passes through the cache's dtype like what is not, so that chunking never
        shows.
        """
        if self.first:
            self.fresh.update(
                {name: made.to(self.fields[name].data.dtype) for name, made in entries.items()}
            )
            self.batch.before.store(self.fields, self.fresh, self.ops)
        return dict(self.fresh)

    def end(self) -> None:
        """Store what is written behind all reads; nothing is left in ``fresh`` then."""
        if self.last:
            self.batch.after.store(self.fields, self.fresh, self.ops)
            self.fresh.clear()

    def past(self, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Copies of ``batch.past`` by field, [P, *entry], but for some fields. To be called before
        ``store``.
        """
        where = self.batch.past
        return {
            name: view.take(where.pages, where.rows)
            for name, view in self.fields.items()
            if name not in without
        }

    def store(self, *, written: Collection[str] = (), **entries: Tensor) -> None:
        """Store ``batch.stored``, ending the step for this stream. entries: by field, one row for
        each of these writes.

        written: fields that a kernel has stored where it made them.
        """
        assert not entries.keys() & set(written), "a field is stored once"
        writes = self.batch.stored
        self._write(writes.pages, writes.rows, entries, written)

    def store_entries(self, stride: int, **entries: Tensor) -> None:
        """Store the entries of ``batch.closed(stride)``, given by field, one row for each."""
        writes = self.batch.closed(stride).writes
        self._write(
            writes.pages,
            writes.rows,
            {name: made.index_select(0, writes.tokens) for name, made in entries.items()},
        )

    def take(self, requests: Tensor, numbers: Tensor, *, stride: int = 1) -> dict[str, Tensor]:
        """Copies of entries by field, [*shape, *entry]: number ``numbers`` of ``requests``, int64
        of one shape.

        For laws that let nothing go. Negative numbers give the request's first entry, for the
        caller to select away.
        """
        pages, places = self.batch.locate(requests, numbers * stride)
        rows = places // stride
        return {name: view.take(pages, rows) for name, view in self.fields.items()}

    def _write(
        self,
        pages: Tensor,
        rows: Tensor,
        entries: Mapping[str, Tensor],
        written: Collection[str] = (),
    ) -> None:
        assert entries.keys() | set(written) == self.fields.keys(), (
            "all fields of an entry are written together"
        )
        for name, made in entries.items():
            assert made.shape[0] == pages.shape[0], "one row for each write"
            view = self.fields[name]
            view.write(
                pages, rows, made.reshape(made.shape[0], view.data.shape[1], *view.data.shape[3:])
            )
