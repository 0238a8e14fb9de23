"""The form in which a step's caches reach a layer: views of pages, and what is read and written in
them.

Owns ``FieldView`` and ``StreamView`` (a field, and a stream, of one layer over the arena) and
``CacheView`` (a stream of a layer in one step). Knows no plan and no kind.

There are three ways to use a stream, one for each manner of remembering:

- *attend* (keys and values of tokens): ``begin`` → an op reads → ``end``;
- *roll* (a bounded past that a layer reads whole: open groups of compressors; states, by
  ``ops/states.py``): ``roll``;
- *collect* (entries that stay, one per ``stride`` tokens): ``collect``, or ``keep`` where it is one
  per token, and then an op reads them by their numbers.

Rows that a step does not read may hold anything, NaN included. Whoever gathers them selects them
away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.ops.codec import Entry
from octavo.ops.reads import Reads, Writes
from octavo.ops.table import Ops
from octavo.spec.stream import Stream


@dataclass(frozen=True, eq=False)
class FieldView:
    """One field of one stream of one layer in every page of the arena.

    data: [starts, heads, entries, ...]: index 0 is any arena unit a page can begin at, so
        neighbours overlap. Fields without a head axis have heads = 1. headed: does an entry have a
        head axis?
    """

    data: Tensor
    headed: bool = True

    def gather_head(self, pages: Tensor, head: int) -> Tensor:
        """Copies of one head's part of whole pages: int64 [P] unit offsets -> [P, entries, ...]."""
        kept = self.data.view(torch.uint8) if self.data.element_size() == 1 else self.data
        return kept.select(1, head).index_select(0, pages).view(self.data.dtype)

    def take(self, pages: Tensor, rows: Tensor, ops: Ops) -> Tensor:
        """Copies of single entries: row ``rows[i]`` of page ``pages[i]``, int64 of any one shape ->
        [*shape, *entry].
        """
        found = ops.gather(self.data, pages, rows)
        return found if self.headed else found.squeeze(pages.dim())


class StreamView:
    """One stream of one layer over the arena: its fields, and how entries lie in them. Made
    once.
    """

    def __init__(self, stream: Stream, fields: Mapping[str, FieldView]) -> None:
        self.stream, self.fields, self.entry = stream, fields, Entry(stream)
        assert fields.keys() == {field.name for field in stream.fields}, "all fields of the stream"

    @property
    def plain(self) -> bool:
        """Whether every part is one field of numbers as they are."""
        return self.entry.plain

    def by_head(self, part: str, pages: Tensor, head: int, dtype: torch.dtype) -> Tensor:
        """Copies of whole pages, one head's part: int64 [P] unit offsets -> [P, entries, ...]."""
        stored = {
            name: self.fields[name].gather_head(pages, head) for name in self.entry.fields_of(part)
        }
        return self.entry.decode_part(part, stored, dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """What a layer sees of one of its streams in one step: its fields by name, and where to read
    and write. Layers speak of *parts* of entries, in the dtype that they compute in; how these are
    kept in fields is the codec's.

    fresh: the step's entries as the cache will hold them, by field, [E, heads, ...]. Where layers
        share a stream, the ``first`` makes them and leaves them here, the same mapping for all of
        them; the ``last`` does the writing behind the reads, since a page that is written may still
        be read by those between.
    """

    over: StreamView
    reads: Reads
    ops: Ops
    fresh: dict[str, Tensor] = field(default_factory=dict)
    first: bool = True
    last: bool = True

    @property
    def fields(self) -> Mapping[str, FieldView]:
        """The stream's fields by name."""
        return self.over.fields

    @property
    def stride(self) -> int:
        """Tokens of an entry."""
        return self.over.stream.stride

    def begin(self, **parts: Tensor) -> None:
        """The step's entries, [E, ...] each, from the first layer that uses the stream. Stores what
        is stored ahead of all reads.

        What is fresh passes through the cache's dtype like what is not, so that chunking never
        shows.
        """
        assert self.first, "the first layer makes the entries"
        self.fresh.update(self._encoded(parts))
        self._store(self.reads.before)

    def end(self) -> None:
        """Store what is stored behind all reads; nothing is left in ``fresh`` then."""
        if self.last:
            self._store(self.reads.after)
            self.fresh.clear()

    def keep(self, **parts: Tensor) -> None:
        """Store the step's entries ahead of all reads, under a law that lets nothing go."""
        self.begin(**parts)
        self.end()

    def own(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The step's entries between ``begin`` and ``end`` as they will be read later: [E, ...] of
        each part.
        """
        return self.over.entry.decode(
            {name: self._entry(name, made) for name, made in self.fresh.items()}, dtype
        )

    def past(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of ``reads.past``: [P, ...] of each part."""
        where = self.reads.past
        return self.over.entry.decode(self._gathered(where.pages, where.rows), dtype)

    def seen(self, request: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """All that the queries of a request's part may see, between ``begin`` and ``end``:
        positions, int64 [L] ascending, and [L, ...] of each part.

        For layers that mix in a way of their own. What a single query sees of it is the law's to
        say.
        """
        parts, past = self.reads.parts, self.reads.past
        behind = slice(*past.start_loc[request : request + 2].tolist())
        own = slice(*parts.entry_start_loc[request : request + 2].tolist())
        found = self.over.entry.decode(self._gathered(past.pages[behind], past.rows[behind]), dtype)
        made = self.own(dtype)
        entries = {name: torch.cat((kept, made[name][own])) for name, kept in found.items()}
        return torch.cat((past.positions[behind], parts.positions[own])), entries

    def roll(self, **parts: Tensor) -> dict[str, Tensor]:
        """The step's entries, [E, ...] each, behind what their requests have before them: [P + E,
        ...] of each part, rows by ``reads.places``. Stores what is needed later.
        """
        (dtype,) = {made.dtype for made in parts.values()}
        past = self.past(dtype)
        self.fresh.update(self._encoded(parts))
        own = self.own(dtype)
        self._store(self.reads.stored)
        self.fresh.clear()
        return {name: torch.cat((past[name], made)) for name, made in own.items()}

    def collect(self, **parts: Tensor) -> None:
        """Store the entries of ``reads.closed(stride)``, one row for each, ahead of all reads."""
        self._store(self.reads.closed(self.stride).writes, self._encoded(parts))

    def take(self, requests: Tensor, numbers: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of entries number ``numbers`` of ``requests``, int64 of one shape: [*shape, ...]
        of each part.

        For laws that let nothing go. Negative numbers give the request's first entry, for the
        caller to select away.
        """
        pages, places = self.reads.locate(requests, numbers * self.stride)
        return self.over.entry.decode(self._gathered(pages, places // self.stride), dtype)

    def _encoded(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By field, [E, heads, ...]."""
        return {
            name: made if self.fields[name].headed else made[:, None]
            for name, made in self.over.entry.encode(parts).items()
        }

    def _entry(self, name: str, made: Tensor) -> Tensor:
        """[n, heads, ...] of a field -> [n, ...], without a head axis where it has none."""
        return made if self.fields[name].headed else made.squeeze(1)

    def _gathered(self, pages: Tensor, rows: Tensor) -> dict[str, Tensor]:
        return {name: view.take(pages, rows, self.ops) for name, view in self.fields.items()}

    def _store(self, writes: Writes, made: Mapping[str, Tensor] | None = None) -> None:
        """Write the chosen rows of ``made``, or of ``fresh``."""
        made = self.fresh if made is None else made
        if writes.entries.numel():
            data = [self.fields[name].data for name in made]
            self.ops.store(data, writes.pages, writes.rows, list(made.values()), writes.entries)
