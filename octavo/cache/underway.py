"""The step that is being built: what its requests have taken so far.

Owns ``StepUnderway``. Copies, addresses of chunks and pages that are read in another place than
written are gathered while requests are extended one after another; ``take`` makes the groups' parts
of the step plan of them and begins the next step. Knows tables and plans that were carried out;
knows no requests and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from octavo.cache.block_plan import Span
from octavo.cache.group_step import CopyJob, GroupStep
from octavo.cache.tables import AppendTable, Rings
from octavo.memory.remap import Remap


class StepUnderway:
    """appends: the growing groups' tables by group. rings: all others; ring_of: by group, which."""

    def __init__(
        self, appends: Mapping[int, AppendTable], rings: Rings, ring_of: Mapping[int, int]
    ) -> None:
        self._appends, self._rings, self._ring_of = appends, rings, ring_of
        layouts = {group: append.layout for group, append in appends.items()}
        layouts |= {group: rings.layouts[ring] for group, ring in ring_of.items()}
        self._layouts = [layouts[group] for group in range(len(layouts))]
        self._block = np.array([[one.block_tokens] for one in self._layouts], np.int64)
        # Of single tokens, whether their past is read before anything is written.
        self._fresh = np.array([[one.group.law.reads_before_writing] for one in self._layouts])
        self._jobs: list[CopyJob] = []
        # By group and row, chunks; and (rows, columns, pages) of single tokens that are read in
        # these pages and written to others.
        self._spans: list[dict[int, Span]] = [{} for _ in self._layouts]
        self._elsewhere: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    # -- gathering ---------------------------------------------------------------------------------

    def copy(self, jobs: Iterable[CopyJob]) -> None:
        """Copies that must run before the step, behind those noted so far."""
        self._jobs += jobs

    def compute(self, group: int, span: Span) -> None:
        """A chunk of a row that is part of the step."""
        self._spans[group][span.plan.row] = span

    def read_elsewhere(self, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        """Single tokens whose past lies in ``pages``, not where the tables have these columns."""
        if len(rows):
            self._elsewhere.append((rows, columns, pages.copy()))

    def drop(self, row: int) -> None:
        """A row gives everything up: it is not part of the step any more."""
        for spans in self._spans:
            spans.pop(row, None)
        kept = [(rows != row, parts) for parts in self._elsewhere for rows in parts[:1]]
        self._elsewhere = [
            (parts[0][stays], parts[1][stays], parts[2][stays]) for stays, parts in kept
        ]

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        for span in chain.from_iterable(spans.values() for spans in self._spans):
            moved.apply(span.pages)
            moved.apply(span.past)
        for _, _, pages in self._elsewhere:
            moved.apply(pages)

    @property
    def empty(self) -> bool:
        """Has nothing been gathered?"""
        return not (self._jobs or self._elsewhere or any(self._spans))

    # -- handing out -------------------------------------------------------------------------------

    def take_copies(self) -> tuple[CopyJob, ...]:
        """Copies that must run before the step, in order. They are not handed out again."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_groups(
        self, rows: np.ndarray, start: np.ndarray, query_start: np.ndarray
    ) -> tuple[GroupStep, ...]:
        """Every group's part of the step, which ends here.

        rows, start: int64 [R], table rows and the first token of each. query_start: [R + 1], where
        its tokens begin among all.
        """
        pages, tables = self._addresses(rows, start)
        block = start // self._block
        places = (start - block * self._block).astype(np.int32)
        fresh = np.repeat(self._fresh, len(rows), axis=1)
        if len(rows) < query_start[-1]:
            lengths = np.diff(query_start)
            pages, places = np.repeat(pages, lengths, axis=1), np.repeat(places, lengths, axis=1)
        order, names = np.arange(len(rows), dtype=np.int32), rows.astype(np.int32)
        steps = []
        for group, layout in enumerate(self._layouts):
            if self._spans[group]:
                part = pages[group], places[group], fresh[group]
                self._place(group, rows, query_start, tables[group], part)
            steps.append(
                GroupStep(
                    table=tables[group],
                    rows=names if layout.fixed is None else order,
                    fixed=layout.fixed,
                    turning=layout.turning,
                    block_tokens=layout.block_tokens,
                    fresh=fresh[group],
                    write_page=pages[group],
                    write_row=places[group],
                )
            )
        self._spans = [{} for _ in self._layouts]
        self._elsewhere = []
        assert pages.shape == places.shape == (len(steps), query_start[-1])
        return tuple(steps)

    def _addresses(
        self, rows: np.ndarray, start: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of every group the pages [groups, R] of tokens ``start``, and the table: of growing
        groups the live one, of the others a copy for these rows.
        """
        rings = self._rings.table.take(rows, axis=0)
        columns = self._rings.columns_at(start)
        turning = self._rings.table[rows, columns]
        for at, where, page in self._elsewhere:
            place = np.full(len(self._rings.table), -1)
            place[rows] = np.arange(len(rows))
            there = place[at] >= 0
            rings[place[at[there]], where[there]] = page[there]
        pages = np.empty((len(self._layouts), len(rows)), np.int32)
        tables = []
        for group, layout in enumerate(self._layouts):
            if (append := self._appends.get(group)) is None:
                ring = self._ring_of[group]
                pages[group] = turning[ring]
                tables.append(rings[:, self._rings.slices[ring]])
            else:
                column = np.minimum(start // layout.block_tokens, append.table.shape[1] - 1)
                pages[group] = append.table[rows, column]
                tables.append(append.table)
        return pages, tables

    def _place(
        self,
        group: int,
        rows: np.ndarray,
        query_start: np.ndarray,
        table: np.ndarray,
        part: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Enter the chunks of a group into its pages, places and ``fresh``, in place."""
        pages, places, fresh = part
        layout, spans = self._layouts[group], self._spans[group]
        for index, row in enumerate(rows.tolist()):
            if (span := spans.get(row)) is None:
                continue
            fresh[index] = span.plan.fresh
            own = slice(int(query_start[index]), int(query_start[index + 1]))
            growing = layout.fixed is None
            pages[own], places[own] = span.placed(layout.block_tokens, growing=growing)
            if span.plan.fresh and not growing:
                table[index] = span.past
