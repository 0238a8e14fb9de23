"""All groups of one model together: tables, index and pool, and what is decided jointly.

Owns ``KVCacheCoordinator``: the order in which tables, rings, checkpoints, chains, index and pool
are asked and told, so that an operation that cannot finish changes nothing. Knows laws only through
``needs``; knows no kinds and no requests beyond a table row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.block_plan import NEVER, NO_PAGES, BlockPlan, Promise
from octavo.cache.chains import Chains
from octavo.cache.group_step import copy_jobs
from octavo.cache.hits import Grain, Hits, Match, grains_of
from octavo.cache.index.policy import DEFAULT_POLICY, make_policy
from octavo.cache.index.tree import Lane, PrefixIndex
from octavo.cache.layout import CacheLayout, pages_by_bucket
from octavo.cache.rolling import RollingCheckpoints
from octavo.cache.schedule import DecodeSchedule
from octavo.cache.tables import AppendTable, GroupTable, Rings, RingTable, TurnPlan
from octavo.cache.underway import StepUnderway
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPlan:
    """What a chunk of one row asks of all groups, in their order. wanted: pages by bucket."""

    groups: tuple[BlockPlan, ...]
    wanted: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPlan:
    """What one more token of several rows asks of all groups.

    appends: by growing group, the rows that begin a block. rings: what the others do, None where
    none is asked. pages: wanted by group.
    """

    appends: Mapping[int, np.ndarray]
    rings: TurnPlan | None
    pages: Sequence[int]


def _lanes(layout: CacheLayout, grains: Sequence[Grain]) -> list[Lane]:
    """The index's lanes of all groups, one after another."""
    return [
        Lane(
            lets_go=group.group.law.prefix is not None,
            group=number,
            page_bytes=group.page_units * layout.arena.unit_bytes,
            units=max(1.0, group.block_tokens / layout.hash_unit),
        )
        for number, (group, grain) in enumerate(zip(layout.groups, grains, strict=True))
        for _ in grain.lanes
    ]


class KVCacheCoordinator:
    """All groups of one model. Rows are table rows; ``n`` counts tokens.

    first_size: how large structures that grow are at first. eviction: a policy's name.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        rows: int,
        max_nodes: int = 1 << 22,
        max_ghosts: int = 1 << 18,
        first_size: int = 16,
        eviction: str = DEFAULT_POLICY,
    ) -> None:
        self.layout, self._unit, self._rows = layout, layout.hash_unit, rows
        self.pool = PagePool(layout.arena)
        laws = [group.group.law for group in layout.groups]
        self.bounded = [group for group, law in enumerate(laws) if law.prefix is not None]
        self.appends = {
            group: AppendTable(part, self.pool, rows=rows, first_size=first_size)
            for group, part in enumerate(layout.groups)
            if group not in self.bounded
        }
        self.rings = Rings([layout.groups[group] for group in self.bounded], self.pool, rows=rows)
        self.ring_of = {group: ring for ring, group in enumerate(self.bounded)}
        self._turning = {
            group: RingTable(self.rings, ring, self.pool) for group, ring in self.ring_of.items()
        }
        tables: dict[int, GroupTable] = {**self.appends, **self._turning}
        self.groups = tuple(tables[group] for group in range(len(laws)))
        self.grains = grains_of(layout)
        self.index = PrefixIndex(
            self.pool,
            lanes=_lanes(layout, self.grains),
            unit_tokens=self._unit,
            policy=make_policy(eviction),
            max_nodes=max_nodes,
            max_ghosts=max_ghosts,
            first_size=first_size,
        )
        self.hits = Hits(layout, self.grains, self.index)
        self.chains = Chains(
            self.index, self.pool, self.groups, self.appends, self.grains, unit=self._unit
        )
        # Groups whose rings cannot tell at the end of a turn what its last whole unit needs.
        self.rolling_groups = np.array(
            [g for g in self.bounded if not layout.groups[g].reaches_back(self._unit)], np.int64
        )
        self.rolling = RollingCheckpoints(
            self.rings,
            self.pool,
            rolling=[self.ring_of[group] for group in self.rolling_groups.tolist()],
        )
        self.schedule = DecodeSchedule(self.appends, self.rings, self.bounded, rows=rows)
        self.underway = StepUnderway(self.appends, self.rings, self.ring_of)
        # By row, checkpoint and bounded group, what is kept until a step's receipt.
        self._promises: dict[int, dict[int, dict[int, Promise]]] = {}
        self.compactions = self.moved_pages = 0

    # -- questions ---------------------------------------------------------------------------------

    def lookup(self, keys: np.ndarray, limit: int) -> Match:
        """Match a chain; the hit is at most ``limit`` units."""
        return self.hits.lookup(keys, limit)

    def table_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the pages in the tables of rows, over all groups."""
        units = sum(table.num_blocks(rows) * table.layout.page_units for table in self.groups)
        return np.asarray(units) * self.layout.arena.unit_bytes

    def promised(self, row: int) -> dict[int, dict[int, Promise]]:
        """By checkpoint and bounded group, what a row keeps until a receipt."""
        return self._promises.get(row, {})

    def referred_pages(self, row: int, group: int) -> np.ndarray:
        """Every page that a row has a reference on for its table and its promises in one group,
        once per reference.
        """
        marks = self.promised(row).values() if group in self.ring_of else ()
        kept = [promises[group].pages for promises in marks]
        return np.concatenate([self.groups[group].held_pages(row), *kept])

    def num_held(self, row: int, group: int) -> int:
        """Different pages of a group that a row's table and promises refer to."""
        return len(np.unique(self.referred_pages(row, group)))

    def kept_pages(self, row: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and pages of a group that a row's rolling checkpoint keeps; none without one."""
        mark = int(self.rolling.kept_at[row])
        blocks = self.groups[group].blocks_needed(mark)
        return blocks, self.rolling.pages(row, self.ring_of[group], blocks)

    def held_pages(self, row: int) -> tuple[np.ndarray, ...]:
        """By group, what a row refers to: its table, its checkpoints and its chain. int32,
        ascending, no page twice.
        """
        return tuple(
            np.union1d(self.referred_pages(row, group), self.chains.extra(row, group))
            for group in range(len(self.groups))
        )

    def held_bytes(self, row: int) -> int:
        """Bytes of the different pages that a row's tables and checkpoints refer to."""
        if not self.promised(row):
            return int(self.table_bytes(np.array([row]))[0])
        units = sum(
            self.num_held(row, group) * table.layout.page_units
            for group, table in enumerate(self.groups)
        )
        return units * self.layout.arena.unit_bytes

    @property
    def hands_back(self) -> bool:
        """Does a request hold fewer pages at times than before, while it decodes?"""
        laws = [group.group.law for group in self.layout.groups]
        return any(law.next_release(0) is not None for law in laws)

    @property
    def in_flight(self) -> bool:
        """Are pages waiting for a receipt?"""
        return self.pool.waiting

    @property
    def _buckets(self) -> Sequence[int]:
        return self.layout.arena.page_units

    def newly_held(self, match: Match) -> list[int]:
        """Pages by bucket that nobody refers to now and that a row beginning on ``match`` would."""
        counts = [0] * len(self._buckets)
        for group, part in enumerate(self.layout.groups):
            _, pages, _ = self.hits.needed(group, match)
            if group in self.appends and len(match.nodes):
                pages = np.concatenate([pages, self.chains.unheld(group, match.nodes, pages)])
            counts[part.bucket] += int(np.count_nonzero(self.pool.idle(np.unique(pages))))
        return counts

    # -- beginning ---------------------------------------------------------------------------------

    def adopt(self, row: int, match: Match) -> None:
        """Begin a request on what a match found: shared, read-only, held. Nothing can fail here;
        ``clear`` undoes it.
        """
        for group, table in enumerate(self.groups):
            blocks, pages, filled = self.hits.needed(group, match)
            table.adopt(row, blocks, pages, filled=filled)
            self.pool.retain(pages)
        self.chains.begin(row, match.nodes)
        self.schedule.invalidate(row, match.hit * self._unit)

    def fork(self, source: int, row: int, n: int) -> None:
        """Begin a request on all that ``source`` holds after ``n`` tokens, none of them in flight.
        Nothing can fail here.
        """
        assert not self.promised(source), "forks are made at a receipt"
        for table in self.groups:
            self.pool.retain(table.fork(source, row, n))
        self.chains.fork(source, row)
        self.schedule.disturb(source, n)
        self.schedule.invalidate(row, n)

    # -- chunks ------------------------------------------------------------------------------------

    def plan(
        self, row: int, start: int, stop: int, *, marks: Sequence[int] = (), shared: int = 0
    ) -> ChunkPlan:
        """What every group needs for tokens ``[start, stop)``. ``shared``: tokens growing groups
        have. Changes nothing.
        """
        plans = tuple(
            table.plan(
                row,
                start,
                stop,
                marks=marks,
                write_from=shared,
                steady=self.schedule.steady(group, row),
            )
            for group, table in enumerate(self.groups)
        )
        asking = [plan for plan in plans if len(plan.pages)]
        for plan, alone in zip(asking, self._alone([p.pages for p in asking]), strict=True):
            plan.recycle(alone)
        wanted = pages_by_bucket(self.layout, [plan.wanted for plan in plans])
        return ChunkPlan(groups=plans, wanted=wanted)

    def _alone(self, pages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Bool: of several arrays of pages, those that nobody else uses. One question for all."""
        stops = list(accumulate(len(part) for part in pages))
        alone = self.pool.exclusive(np.concatenate(pages)) if stops else np.zeros(0, bool)
        return [alone[stop - len(part) : stop] for part, stop in zip(pages, stops, strict=True)]

    def extend(self, plan: ChunkPlan, step: int) -> bool:
        """Carry a plan out if it fits, evicting and compacting as needed. False, and nothing
        changed, where it does not.
        """
        if not self.pool.fits(plan.wanted):
            return False
        self.make_ready(plan.wanted)
        kept: list[np.ndarray] = []
        gone: list[int] = []
        for group, part in enumerate(plan.groups):
            done = self.groups[group].apply(part)
            self.underway.copy(done.jobs)
            self.underway.compute(group, done.span)
            for mark, promise in done.promised.items():
                self._promises.setdefault(part.row, {}).setdefault(mark, {})[group] = promise
                kept.append(promise.pages)
            gone += done.gone
            self.schedule.extended(group, part)
            if group in self.appends and len(part.copied):
                # The chain still stands on the page that was copied from.
                self.chains.hold_all(part.row, group)
        if kept:
            self.pool.retain(np.concatenate(kept))
        self.pool.release(gone, step)
        return True

    # -- single tokens of many requests ------------------------------------------------------------

    def decode(self, rows: np.ndarray, n: np.ndarray, step: int, rolls: np.ndarray) -> bool:
        """Take the pages that token ``n`` of every row writes, for all rows or for none; no row
        shares a block it writes into.

        rolls: bool [R], rows that leave a checkpoint behind at ``n`` tokens in place of their last
        one, where there is room.
        False, and nothing changed, where the pages do not fit.
        """
        due = self.schedule.groups_due(rows, n)
        plan = self.plan_tokens(due, rows, n)
        if rolls.any() and self.pool.fits(self._with_rolls(plan, rolls)):
            at = rolls.nonzero()[0]
            due[self.rolling_groups[:, None], at] = self._roll(rows[at], n[at], step)
            plan = self.plan_tokens(due, rows, n)
        wanted = pages_by_bucket(self.layout, plan.pages)
        if not self.pool.fits(wanted):
            return False
        self.make_ready(wanted)
        pages = [
            self.pool.allocate(group.bucket, count)
            for group, count in zip(self.layout.groups, plan.pages, strict=True)
        ]
        for group, beginning in plan.appends.items():
            self.appends[group].append(beginning, pages[group])
            self.schedule.appended(group, rows[due[group]], n[due[group]])
        if plan.rings is not None:
            taken = np.concatenate([pages[group] for group in self.bounded])
            self.pool.release(self._turn(plan.rings, taken), step)
        return True

    def plan_tokens(self, due: np.ndarray, rows: np.ndarray, n: np.ndarray) -> TokenPlan:
        """What token ``n`` of rows asks of the groups ``due`` (bool [groups, R]). Changes
        nothing.
        """
        counts = [0] * len(self.groups)
        appends = {}
        for group, table in self.appends.items():
            if due[group].any():
                appends[group] = table.plan_token(rows[due[group]], n[due[group]])
                counts[group] = len(appends[group])
        ring, at = np.nonzero(due[self.bounded])
        turn = self.rings.plan_turn(ring, rows[at], n[at]) if len(ring) else None
        for number, count in enumerate(turn.wanted(len(self.bounded)) if turn else ()):
            counts[self.bounded[number]] = count
        return TokenPlan(appends=appends, rings=turn, pages=counts)

    def _turn(self, plan: TurnPlan, pages: np.ndarray) -> np.ndarray:
        before = self.rings.table[plan.row, plan.column]
        gone, moved = self.rings.turn(plan, pages)
        moved &= before != NO_PAGE
        self.underway.read_elsewhere(plan.row[moved], plan.column[moved], before[moved])
        self.schedule.turned(plan)
        return gone

    def _roll(self, rows: np.ndarray, n: np.ndarray, step: int) -> np.ndarray:
        """Leave checkpoints behind at ``n`` tokens. Bool [rolling rings, R]: which must turn now,
        whatever the schedule says.
        """
        turns = np.ones((len(self.rolling_groups), len(rows)), bool)
        self.schedule.rolled(self.rolling_groups, rows, n)
        for trade in self.rolling.roll(rows, n, step):
            turns[self.rolling.rolling.index(trade.ring)] = ~trade.done
            traded = rows[trade.done]
            column = self.rings.slices[trade.ring].start
            self.underway.read_elsewhere(traded, np.full(len(traded), column), trade.pages)
            self.schedule.traded(self.bounded[trade.ring], traded)
        return turns

    def _with_rolls(self, plan: TokenPlan, rolls: np.ndarray) -> list[int]:
        """Pages per bucket that are wanted at most where rows roll: those of a plan, and a page for
        every row and group that rolls.
        """
        pages = np.array(plan.pages)
        pages[self.rolling_groups] += np.count_nonzero(rolls)
        return pages_by_bucket(self.layout, pages.tolist())

    # -- room --------------------------------------------------------------------------------------

    def make_ready(self, wanted: Sequence[int]) -> None:
        """Reclaim until ``allocate`` can serve what ``fits``: let go of as much as gathering free
        pages cannot give, then gather.
        """
        if self.pool.ready(wanted):
            return
        assert self.pool.fits(wanted)
        self._let_go(wanted)
        while not self.pool.ready(wanted):
            moves = self.pool.compact()
            assert moves is not None, "what can be gathered is gathered"
            self.underway.copy(
                copy_jobs(moves.sources.tolist(), moves.targets.tolist(), moves.units)
            )
            self._remap(Remap(moves.sources, moves.targets))
            self.compactions += 1
            self.moved_pages += len(moves.sources)

    def _let_go(self, wanted: Sequence[int]) -> None:
        """Evict, and where that is not enough forget rolling checkpoints that keep bytes nobody
        uses, until gathering is enough.
        """
        self.index.evict(wanted)
        while self.pool.gap(wanted):
            row = self.rolling.idle_row()
            assert row is not None, "what fits can be made ready"
            self.rolling.forget(row)

    def _remap(self, moved: Remap) -> None:
        self.index.remap(moved)
        for table in self.appends.values():
            table.remap(moved)
        self.rings.remap(moved)
        self.rolling.remap(moved)
        self.chains.remap(moved)
        self.underway.remap(moved)
        for marks in self._promises.values():
            for promises in marks.values():
                for promise in promises.values():
                    moved.apply(promise.pages)

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, row: int, keys: np.ndarray, step: int | None) -> None:
        """Put the units ``keys[published:]``, all computed and received, into the index; share what
        others put there first.
        """
        self.chains.publish(row, keys, step)
        self.index.shrink()

    def claim_promised(self, row: int, n: int, planned: int, step: int | None) -> None:
        """Make resume points of a row's checkpoints up to ``n`` tokens, whose receipts are there.
        planned: its tokens whose steps have been planned.
        """
        waiting = self.promised(row)
        for mark in sorted(mark for mark in waiting if mark <= n):
            promises = waiting.pop(mark)
            self.chains.claim(row, mark, promises)
            for promise in promises.values():
                self.pool.release(promise.pages, step)
            self.schedule.disturb(row, planned)

    def next_promise(self, row: int) -> int:
        """The first checkpoint of a row whose pages are being kept, else NEVER."""
        return min(self.promised(row), default=NEVER)

    def claim_end(self, row: int, mark: int, planned: int) -> bool:
        """Make a resume point at ``mark`` tokens out of what the tables, which have ``planned``
        tokens, or a rolling checkpoint still have. False where something is gone.
        """
        found = {}
        for group, table in self._turning.items():
            ring, blocks = self.ring_of[group], table.blocks_needed(mark)
            if ring in self.rolling.rolling and self.rolling.kept_at[row] == mark:
                pages = self.rolling.pages(row, ring, blocks)
            elif (there := table.pages_of(row, blocks, planned)) is not None:
                pages = there
            else:
                return False
            found[group] = Promise(blocks=blocks, pages=pages)
        self.chains.claim(row, mark, found)
        return True

    # -- leaving -----------------------------------------------------------------------------------

    def clear(self, row: int, step: int | None) -> None:
        """Let go of everything a row holds; pages that a step in flight may touch wait for its
        receipt.
        """
        self.rolling.forget(row)
        self.underway.drop(row)
        nodes, extra = self.chains.nodes(row), self.chains.end(row)
        for group, table in enumerate(self.groups):
            self.pool.release(self.referred_pages(row, group), step)
            table.clear(row)
            self.pool.release(extra.get(group, NO_PAGES), step)
        self._promises.pop(row, None)
        self.schedule.invalidate(row, 0)
        self.chains.leave(nodes)
        assert row not in self.chains

    def check(self, planned: np.ndarray) -> None:
        """Assert every invariant, from scratch. planned: tokens planned, by row."""
        self.pool.check()
        self.index.check(self.rolling.all_pages())
        references: dict[int, int] = {}
        for row in range(self._rows):
            n = int(planned[row]) if row in self.chains else 0
            for table in self.groups:
                table.check(row, n)
            self.rolling.check(row, n)
            if row not in self.chains:
                assert not self.promised(row) and not self.rolling.kept_at[row]
                continue
            self.chains.check(row)
            self.schedule.check(row, n)
            for group in range(len(self.groups)):
                held = (*self.referred_pages(row, group), *self.chains.extra(row, group))
                for page in map(int, held):
                    references[page] = references.get(page, 0) + 1
        pages = np.array(sorted(references), np.int32)
        counted = np.array([references[page] for page in pages.tolist()], np.int32)
        assert (self.pool.references(pages) == counted + self.pool.in_flight(pages)).all(), (
            "every reference has a holder"
        )
