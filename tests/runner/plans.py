"""Step plans by hand: what a scheduler and a cache manager would say, for tests of everything below
them.

Owns a bump allocator and one table per group. Writes by the contract of ``GroupStep``: a bounded
group whose step does not fit in its ring reads first and stores only what will be needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.base import NO_PAGE, ceil_div, floor_to, round_up
from octavo.cache.layout import CacheLayout, GroupLayout
from octavo.memory.layout import ArenaLayout
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.group import make_groups
from octavo.spec.kind import ModelSpec
from octavo.spec.stream import CacheDtypes

UNIT = 256
GREEDY = SamplingParams(temperature=0)


def hand_layout(
    spec: ModelSpec,
    block_tokens: Sequence[int],
    *,
    dtype: CacheDtypes | str = "float32",
    num_pages: int = 256,
) -> CacheLayout:
    """A layout with ``block_tokens[g % len]`` per group, rounded up to whole entries, and
    ``num_pages`` pages of each.
    """
    groups = []
    for number, group in enumerate(make_groups(spec, dtype)):
        page_format = group.page_format(
            round_up(block_tokens[number % len(block_tokens)], group.stride)
        )
        fixed, turning = group.table_columns(page_format.block_tokens)
        units = ceil_div(page_format.page_bytes, UNIT)
        groups.append(
            GroupLayout(
                group=group,
                format=page_format,
                bucket=number,
                page_units=units,
                fixed=fixed,
                turning=turning,
            )
        )
    units = tuple(group.page_units for group in groups)
    arena = ArenaLayout(
        unit_bytes=UNIT, slab_units=sum(units) * num_pages, num_slabs=1, page_units=units
    )
    return CacheLayout(groups=tuple(groups), arena=arena, hash_unit=16, max_model_len=4096)


@dataclass
class Chunk:
    """Tokens that one request computes in one step."""

    request: int
    tokens: Sequence[int]
    samples: bool = True
    params: SamplingParams = GREEDY


@dataclass
class PlanMaker:
    """Plans for up to ``requests`` requests. computed: tokens of each that are done. shuffle: seed
    of the pages' order.
    """

    layout: CacheLayout
    requests: int
    shuffle: int = 0
    computed: list[int] = field(init=False)
    tables: list[np.ndarray] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.computed = [0] * self.requests
        self.tables = []
        rng, unit = np.random.default_rng(self.shuffle), 0
        for group in self.layout.groups:
            columns = (
                ceil_div(self.layout.max_model_len, group.block_tokens)
                if group.fixed is None
                else group.fixed + group.turning
            )
            capacity = self.layout.arena.slab_units // sum(self.layout.arena.page_units)
            count = min(self.requests * columns, capacity)
            pages = unit + rng.permutation(count) * group.page_units
            unit += count * group.page_units
            table = np.full((self.requests, columns), NO_PAGE, dtype=np.int32)
            share = count // self.requests
            width = min(share, columns)
            for request in range(self.requests):
                table[request, :width] = pages[request * share : request * share + width]
            self.tables.append(table)
        assert unit <= self.layout.arena.scratch_unit, "the arena is too small for these requests"

    def plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """The plan of one step; the requests count as computed from here on."""
        start = np.array([self.computed[chunk.request] for chunk in chunks], dtype=np.int32)
        lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int32)
        groups = tuple(
            self._group(number, chunks, start, start + lengths)
            for number in range(len(self.layout.groups))
        )
        for chunk in chunks:
            self.computed[chunk.request] += len(chunk.tokens)
        self.steps += 1
        return StepPlan(
            step=self.steps,
            request_ids=tuple(str(chunk.request) for chunk in chunks),
            token_ids=np.concatenate(
                [np.asarray(chunk.tokens, dtype=np.int32) for chunk in chunks]
            ),
            query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            start=start,
            stop=start + lengths,
            samples=np.array([chunk.samples for chunk in chunks]),
            sampling=tuple(chunk.params for chunk in chunks),
            output_len=np.zeros(len(chunks), dtype=np.int32),
            branch=np.zeros(len(chunks), dtype=np.int32),
            groups=groups,
        )

    def _group(
        self, number: int, chunks: Sequence[Chunk], start: np.ndarray, stop: np.ndarray
    ) -> GroupStep:
        layout, table = self.layout.groups[number], self.tables[number]
        size, fresh, pages, rows = layout.block_tokens, [], [], []
        step = GroupStep(
            table=table,
            rows=np.array([chunk.request for chunk in chunks], dtype=np.int32),
            fixed=layout.fixed,
            turning=layout.turning,
            block_tokens=size,
            fresh=np.zeros(0, dtype=bool),
            write_page=np.zeros(0, dtype=np.int32),
            write_row=np.zeros(0, dtype=np.int32),
        )
        for chunk, n0, n1 in zip(chunks, start.tolist(), stop.tolist(), strict=True):
            held = self._fits(layout, n0, n1)
            fresh.append(not held)
            for position in range(n0, n1):
                wanted = held or self._wanted(layout, position, n1)
                page = table[chunk.request, step.column(position // size)] if wanted else NO_PAGE
                assert not wanted or page != NO_PAGE, "the table is too short for this request"
                pages.append(page)
                rows.append(position % size)
        return GroupStep(
            table=table,
            rows=step.rows,
            fixed=layout.fixed,
            turning=layout.turning,
            block_tokens=size,
            fresh=np.array(fresh),
            write_page=np.array(pages, dtype=np.int32),
            write_row=np.array(rows, dtype=np.int32),
        )

    def _fits(self, layout: GroupLayout, n0: int, n1: int) -> bool:
        """True where everything the step reads and makes has a column of its own."""
        if layout.fixed is None:
            return True
        size = layout.block_tokens
        behind = max(int(layout.group.law.first(n0)), layout.fixed * size)
        return ceil_div(n1, size) - behind // size <= layout.turning

    def _wanted(self, layout: GroupLayout, position: int, n1: int) -> bool:
        """True where ``needs(n1)``, rounded out to whole blocks, holds the position."""
        size = layout.block_tokens
        return any(
            floor_to(a, size) <= position < ceil_div(b, size) * size
            for a, b in layout.group.law.needs(n1)
        )
