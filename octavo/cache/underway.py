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

from octavo.base import NO_PAGE
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
        self._groups = len(appends) + len(ring_of)
        self._jobs: list[CopyJob] = []
        # By group and row, chunks; and (rows, columns, pages) of single tokens that are read in
        # these pages and written to others.
        self._spans: list[dict[int, Span]] = [{} for _ in range(self._groups)]
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
        # None where every request has a single token.
        lengths = np.diff(query_start) if len(rows) < query_start[-1] else None
        columns = self._rings.columns_at(start)
        pages = self._rings.table[rows, columns]
        rings = self._rings.table.take(rows, axis=0)
        for at, where, page in self._elsewhere:
            place = np.full(len(self._rings.table), -1)
            place[rows] = np.arange(len(rows))
            there = place[at] >= 0
            rings[place[at[there]], where[there]] = page[there]
        order, names = np.arange(len(rows), dtype=np.int32), rows.astype(np.int32)
        steps = []
        for group in range(self._groups):
            if group in self._appends:
                append = self._appends[group]
                column = np.minimum(start // append.layout.block_tokens, append.table.shape[1] - 1)
                layout, table, named = append.layout, append.table, names
                written = table[rows, column]
            else:
                ring = self._ring_of[group]
                layout, named, written = self._rings.layouts[ring], order, pages[ring]
                table = rings[:, self._rings.slices[ring]]
            places = (start % layout.block_tokens).astype(np.int32)
            fresh = np.full(len(rows), layout.group.law.reads_before_writing)
            if lengths is not None:
                written, places = np.repeat(written, lengths), np.repeat(places, lengths)
            spans = self._spans[group]
            for index, row in enumerate(rows.tolist() if spans else ()):
                if (span := spans.get(row)) is None:
                    continue
                fresh[index] = span.plan.fresh
                part = slice(int(query_start[index]), int(query_start[index + 1]))
                written[part], places[part] = span.placed(
                    layout.block_tokens, growing=layout.fixed is None
                )
                if span.plan.fresh and layout.fixed is not None:
                    table[index] = span.past
            steps.append(
                GroupStep(
                    table=table,
                    rows=named,
                    fixed=layout.fixed,
                    turning=layout.turning,
                    block_tokens=layout.block_tokens,
                    fresh=fresh,
                    write_page=written,
                    write_row=places,
                )
            )
        self._spans = [{} for _ in range(self._groups)]
        self._elsewhere = []
        assert all((step.write_page >= NO_PAGE).all() for step in steps)
        return tuple(steps)
