"""Joint decisions over all groups: how far a prefix hits, whether a step fits, what becomes of it.

Owns ``KVCacheCoordinator``: the order in which groups, index and pool are asked, so that an
operation that cannot finish changes nothing. Knows laws only through ``needs``; knows no kinds and
no requests beyond a table row.

The hit of the whole model is a joint fixed point: the largest number of tokens at which *every*
group can resume. A group may only lower the candidate, so the order of groups never matters.
Between it and the longest match of the growing groups, a request recomputes tokens for the bounded
groups only; the growing ones share the pages that are there and write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from octavo.base import NO_PAGE, ceil_div
from octavo.cache.block_plan import NEVER, BlockPlan, Promise, TurnPlan, blocks_in
from octavo.cache.group_step import CopyJob, copy_jobs
from octavo.cache.layout import CacheLayout, pages_by_bucket
from octavo.cache.prefix import ROOT, Claim, PrefixIndex
from octavo.cache.single_type import SingleTypeKVCacheManager
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap

_FIRST_LOOK = 32
"""Units behind the longest match that a lookup tries first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """What the index has of a chain of keys, in hash units.

    nodes: of the longest match. hit: units at which every group can resume. reach: units each group
        alone would allow.
    """

    nodes: np.ndarray
    hit: int
    reach: tuple[int, ...]

    @property
    def matched(self) -> int:
        """Units of the longest match."""
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True)
class Grain:
    """How one group's blocks and the index's units nest.

    tokens: the smaller of block and unit. per_unit: grains in a unit. lanes: index lanes of the
        group, for the last grains of a unit (a law with a short memory never claims the first
        ones).
    """

    tokens: int
    per_unit: int
    lanes: range

    @property
    def rows(self) -> slice:
        """``lanes`` as an index that copies nothing."""
        return slice(self.lanes.start, self.lanes.stop)

    def lane(self, grain: np.ndarray) -> np.ndarray:
        """Index lane of grains, counted from token 0."""
        return grain % self.per_unit - (self.per_unit - len(self.lanes)) + self.lanes.start


def _grains(layout: CacheLayout) -> tuple[Grain, ...]:
    grains, lane = [], 0
    for group in layout.groups:
        tokens = min(group.block_tokens, layout.hash_unit)
        per_unit, law = layout.hash_unit // tokens, group.group.law
        lanes = (
            per_unit
            if law.prefix != 0 or law.span > layout.hash_unit
            else min(per_unit, ceil_div(law.span, tokens))
        )
        grains.append(Grain(tokens=tokens, per_unit=per_unit, lanes=range(lane, lane + lanes)))
        lane += lanes
    return tuple(grains)


class _Chain:
    """The published part of a running request: its nodes, and pages it keeps for them outside its
    tables.
    """

    def __init__(self, groups: int) -> None:
        self.nodes = np.zeros(0, np.int32)
        self.extra: list[set[int]] = [set() for _ in range(groups)]


class KVCacheCoordinator:
    """All groups of one model. Rows are table rows; ``n`` counts tokens."""

    def __init__(
        self, layout: CacheLayout, *, rows: int, max_nodes: int = 1 << 22, max_ghosts: int = 1 << 16
    ) -> None:
        self.layout, self._unit = layout, layout.hash_unit
        self.pool = PagePool(layout.arena)
        self.groups = tuple(
            SingleTypeKVCacheManager(group, self.pool, rows=rows) for group in layout.groups
        )
        self.grains = _grains(layout)
        self.bounded = [
            index for index, group in enumerate(self.groups) if group.law.prefix is not None
        ]
        self.growing = [
            index for index, group in enumerate(self.groups) if group.law.prefix is None
        ]
        lets_go = [
            index in self.bounded for index, grain in enumerate(self.grains) for _ in grain.lanes
        ]
        self.index = PrefixIndex(
            self.pool, bounded=lets_go, max_nodes=max_nodes, max_ghosts=max_ghosts
        )
        # Groups whose rings cannot tell at the end of a turn what its last whole unit needs, and
        # where they last kept it.
        self.rolling = [
            index for index in self.bounded if not layout.groups[index].reaches_back(self._unit)
        ]
        self.kept_at = np.zeros(rows, np.int64)
        self._chains: dict[int, _Chain] = {}
        self.jobs: list[CopyJob] = []
        self.compactions = self.moved_pages = 0

    # -- lookup ------------------------------------------------------------------------------------

    def lookup(self, keys: np.ndarray, limit: int) -> Match:
        """Match a chain; the hit is at most ``limit`` units. Changes nothing.

        Lengths are tried from the longest down, ever more at a time: the nearer the resume point,
        the less is looked at.
        """
        nodes = self.index.match(keys)
        stop = hit = min(limit, len(nodes))
        reach, width = dict.fromkeys(range(len(self.groups)), len(nodes)), _FIRST_LOOK
        # What a resume point claims is whole: nothing needs to be looked at.
        ends_well = not stop or self.index.is_resume_point(int(nodes[stop - 1]))
        if ends_well:
            reach |= dict.fromkeys(self.bounded, stop)
        open_groups = set() if ends_well else set(self.bounded)
        while open_groups:
            low = max(0, stop - width)
            good = np.ones(stop - low + 1, bool)
            for index in self.bounded:
                able = self._resumable(index, nodes, low, stop)
                good &= able
                if index in open_groups and able.any():
                    reach[index] = low + int(np.flatnonzero(able)[-1])
                    open_groups.discard(index)
            if good.any():
                hit = low + int(np.flatnonzero(good)[-1])
                break
            stop, width = low - 1, 4 * width
        return Match(nodes=nodes, hit=hit, reach=tuple(reach.values()))

    def _resumable(self, index: int, nodes: np.ndarray, low: int, stop: int) -> np.ndarray:
        """Bool: can this bounded group resume after ``low`` to ``stop`` units? True at 0."""
        grain, law = self.grains[index], self.groups[index].law
        n = np.arange(low, stop + 1) * self._unit
        front = np.minimum(law.prefix or 0, n)
        start = np.minimum(np.maximum(law.first(n), front), n)
        base = int(start.min()) // self._unit
        missing, offset = self._missing(index, nodes[base:stop]), base * grain.per_unit
        ends, starts = n // grain.tokens - offset, start // grain.tokens - offset
        able = missing[ends] - missing[np.where(start < n, starts, ends)] == 0
        if law.prefix:
            able &= (
                self._missing(index, nodes[: ceil_div(int(front[-1]), self._unit)])[
                    -(-front // grain.tokens)
                ]
                == 0
            )
        return np.asarray(able)

    def _missing(self, index: int, nodes: np.ndarray) -> np.ndarray:
        """Of the grains of nodes, how many before each one are not there: [grains + 1]."""
        grain = self.grains[index]
        absent = np.ones((len(nodes), grain.per_unit), np.int64)
        absent[:, grain.per_unit - len(grain.lanes) :] = (
            self.index.pages[grain.rows][:, nodes] == NO_PAGE
        ).T
        return np.concatenate([[0], np.cumsum(absent.reshape(-1))])

    # -- admission ---------------------------------------------------------------------------------

    def adopt(self, row: int, match: Match) -> None:
        """Begin a request on what a match found: shared, read-only, held. Nothing can fail here;
        ``clear`` undoes it.
        """
        chain = self._chains[row] = _Chain(len(self.groups))
        chain.nodes = match.nodes
        n = match.hit * self._unit
        for index, group in enumerate(self.groups):
            growing = index in self.growing
            needed = ((0, match.matched * self._unit),) if growing else group.law.needs(n)
            if not match.matched:
                group.next_event[row] = n
                continue
            blocks, pages = self._indexed_pages(
                index, match.nodes, blocks_in(needed, self.grains[index].tokens)
            )
            group.adopt(row, n, blocks, pages, filled=needed[-1][1] if needed else 0)
            self.pool.retain(pages)
            if growing:
                self._keep_extra(row, index, match.nodes, 0)
        self.index.enter(self._last(row))

    def fork(self, source: int, row: int, n: int) -> None:
        """Begin a request on all that ``source`` holds after ``n`` tokens, none of them in flight.
        Nothing can fail here.
        """
        nodes, extra = self._chains[source].nodes, self._chains[source].extra
        chain = self._chains[row] = _Chain(len(self.groups))
        chain.nodes, chain.extra = nodes, [set(pages) for pages in extra]
        for group, pages in zip(self.groups, chain.extra, strict=True):
            self.pool.retain(group.fork(source, row, n))
            self.pool.retain(np.array(sorted(pages), np.int32))
        self.index.enter(self._last(row))

    def _indexed_pages(
        self, index: int, nodes: np.ndarray, grains: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of the needed grains, and for each the page of its last one: that page has the
        rows before it too.
        """
        grain = self.grains[index]
        blocks = grains * grain.tokens // self.groups[index].layout.block_tokens
        last = np.flatnonzero(np.append(blocks[1:] != blocks[:-1], [True] * bool(len(blocks))))
        pages = self.index.pages[
            grain.lane(grains[last]), nodes[grains[last] * grain.tokens // self._unit]
        ]
        assert (pages != NO_PAGE).all(), "a hit is warm"
        return blocks[last], pages.astype(np.int32)

    def _keep_extra(self, row: int, index: int, nodes: np.ndarray, first: int) -> None:
        """Hold what a chain's nodes, from unit ``first`` on, have in other pages than the table: it
        must not be reclaimed.
        """
        grain, group = self.grains[index], self.groups[index]
        blocks = (
            np.arange(first * grain.per_unit, (first + len(nodes)) * grain.per_unit) * grain.tokens
        )
        pages = self.index.pages[grain.rows][:, nodes].T.reshape(-1)
        other = pages[pages != group.pages_at(row, blocks // group.layout.block_tokens)]
        extra = set(other.tolist()) - self._chains[row].extra[index]
        if not extra:
            return
        self.pool.retain(np.array(sorted(extra), np.int32))
        self._chains[row].extra[index] |= extra

    def _last(self, row: int) -> int:
        nodes = self._chains[row].nodes
        return int(nodes[-1]) if len(nodes) else ROOT

    # -- one step ----------------------------------------------------------------------------------

    def next_event(self, rows: np.ndarray) -> np.ndarray:
        """The first ``start`` at which each row needs ``extend``; before it, decoding asks nothing
        of the cache.
        """
        return np.minimum.reduce([group.next_event[rows] for group in self.groups])

    def table_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the pages in the tables of rows, over all groups."""
        return np.asarray(
            sum(group.held_bytes(rows, self.layout.arena.unit_bytes) for group in self.groups)
        )

    def disturb(self, row: int, n: int) -> None:
        """Pages of a row with ``n`` planned tokens have been published: rings may not turn over
        them.
        """
        for index in self.bounded:
            self.groups[index].settle(row, n)

    def wanted(self, plans: Sequence[tuple[int, BlockPlan | TurnPlan]]) -> list[int]:
        """Pages per bucket that plans ask for."""
        wanted = [0] * len(self.layout.arena.page_units)
        for index, plan in plans:
            wanted[self.groups[index].layout.bucket] += plan.wanted
        return wanted

    def plan(
        self, row: int, start: int, stop: int, *, marks: Sequence[int] = (), shared: int = 0
    ) -> list[tuple[int, BlockPlan]]:
        """What every group needs for tokens ``[start, stop)``. ``shared``: tokens growing groups
        have.
        """
        plans = [
            (i, group.plan(row, start, stop, marks=marks, write_from=shared))
            for i, group in enumerate(self.groups)
        ]
        self._recycle(plans)
        return plans

    def _recycle(self, plans: Sequence[tuple[int, BlockPlan | TurnPlan]]) -> None:
        """Tell plans which of the pages they could recycle nobody else uses."""
        asking = [plan for _, plan in plans if len(plan.pages)]
        for plan, alone in zip(asking, self._alone([plan.pages for plan in asking]), strict=True):
            plan.recycle(alone)

    def _alone(self, pages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Bool: of several arrays of pages, those that nobody else uses. One question for all
        groups.
        """
        stops = list(accumulate(len(part) for part in pages))
        alone = (
            self.pool.exclusive(np.concatenate(pages)) if stops and stops[-1] else np.zeros(0, bool)
        )
        return [alone[stop - len(part) : stop] for part, stop in zip(pages, stops, strict=True)]

    def extend(self, plans: Sequence[tuple[int, BlockPlan]], step: int) -> bool:
        """Carry plans out if they fit, evicting and compacting as needed. False, and nothing
        changed, where they do not.
        """
        wanted = self.wanted(plans)
        if not self.pool.fits(wanted):
            return False
        self.make_ready(wanted)
        kept: list[int] = []
        gone: list[int] = []
        for index, plan in plans:
            done = self.groups[index].apply(plan)
            self.jobs += done.jobs
            kept += done.kept
            gone += done.gone
            if index in self.growing and len(plan.copied):
                # The chain still stands on the page that was copied from.
                self._keep_extra(plan.row, index, self._chains[plan.row].nodes, 0)
        self.pool.retain(kept)
        self.pool.release(gone, step)
        return True

    def decode(self, rows: np.ndarray, n: np.ndarray, step: int, rolls: np.ndarray) -> bool:
        """Take the pages that token ``n`` of every row writes, for all rows or for none; no row
        shares a block it writes into.

        rolls: bool [R], rows that leave a checkpoint behind at ``n`` tokens in place of their last
        one, where there is room. False, and nothing changed, where the pages do not fit.
        """
        due = [group.next_event[rows] <= n for group in self.groups]
        if rolls.any() and self.pool.fits(self._most_turns(due, rolls)):
            for index, turns in zip(
                self.rolling, self._roll(rows[rolls], n[rolls], step), strict=True
            ):
                due[index][rolls] = turns
        plans = [
            (i, self.groups[i].plan_turn(rows[at], n[at])) for i, at in enumerate(due) if at.any()
        ]
        self._recycle(plans)
        wanted = self.wanted(plans)
        if not self.pool.fits(wanted):
            return False
        self.make_ready(wanted)
        gone = [self.groups[index].turn(plan) for index, plan in plans]
        for (index, plan), alone in zip(
            plans, self._alone([plan.pages for _, plan in plans]), strict=True
        ):
            self.groups[index].schedule(plan, alone)
        self.pool.release(np.concatenate(gone) if gone else [], step)
        return True

    def _roll(self, rows: np.ndarray, n: np.ndarray, step: int) -> list[np.ndarray]:
        """Leave checkpoints behind at ``n`` tokens. For every rolling group, bool [R]: rows that
        must turn now.
        """
        self.kept_at[rows] = n
        kept, dropped, gone, turns = [], [], [], []
        for index in self.rolling:
            traded, pages = self.groups[index].trade(rows, n)
            left = ~traded
            now, before = self.groups[index].keep(rows[left], n[left])
            kept += [pages, now]
            dropped.append(before)
            gone.append(pages)
            turns.append(left)
        self.pool.keep(np.concatenate(kept))
        self.pool.release(np.concatenate(gone), step)
        self.pool.drop(np.concatenate(dropped))
        return turns

    def _most_turns(self, due: Sequence[np.ndarray], rolls: np.ndarray) -> list[int]:
        """Pages per bucket that are wanted at most where rows roll: a page for every row and group
        with something to do.
        """
        pages = [
            np.count_nonzero(at | rolls if i in self.rolling else at) for i, at in enumerate(due)
        ]
        return pages_by_bucket(self.layout, [int(count) for count in pages])

    def _give_up_kept(self) -> bool:
        """Forget one rolling checkpoint that keeps bytes nobody uses. False where there is none."""
        for row in np.flatnonzero(self.kept_at).tolist():
            if any(self.groups[index].keeps_idle(row) for index in self.rolling):
                self._forget_kept(row)
                return True
        return False

    def _forget_kept(self, row: int) -> None:
        self.kept_at[row] = 0
        for index in self.rolling:
            self.groups[index].forget(row)

    def make_ready(self, wanted: Sequence[int]) -> None:
        """Reclaim until ``allocate`` can serve what ``fits``. Free pages are gathered before
        anything cached is let go.
        """
        while not self.pool.ready(wanted):
            assert self.pool.fits(wanted)
            moves = self.pool.compact()
            if moves is None:
                assert self.index.evict() or self._give_up_kept(), "what fits can be made ready"
                continue
            self.jobs += copy_jobs(moves.sources.tolist(), moves.targets.tolist(), moves.units)
            self._remap(Remap(moves.sources, moves.targets))
            self.compactions, self.moved_pages = (
                self.compactions + 1,
                self.moved_pages + len(moves.sources),
            )

    def _remap(self, moved: Remap) -> None:
        self.index.remap(moved)
        for group in self.groups:
            group.remap(moved)
        for chain in self._chains.values():
            for index, extra in enumerate(chain.extra):
                pages = np.array(sorted(extra), np.int32)
                moved.apply(pages)
                chain.extra[index] = set(pages.tolist())

    def held_pages(self, row: int) -> tuple[np.ndarray, ...]:
        """By group, what a row refers to: its table, its checkpoints and its chain. int32,
        ascending, no page twice.
        """
        extra = [np.fromiter(pages, np.int32, len(pages)) for pages in self._chains[row].extra]
        return tuple(
            np.union1d(group.held_pages(row), more)
            for group, more in zip(self.groups, extra, strict=True)
        )

    @property
    def in_flight(self) -> bool:
        """Are pages waiting for a receipt?"""
        return any(
            self.pool.counts(bucket).limbo for bucket in range(len(self.layout.arena.page_units))
        )

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, row: int, keys: np.ndarray, step: int | None) -> None:
        """Put the units ``keys[published:]``, all computed and received, into the index; share what
        others put there first.
        """
        chain = self._chains[row]
        published = len(chain.nodes)
        found = self.index.match(keys, published)
        if len(found):
            self._stand_at(row, found)
            for unit, node in enumerate(found.tolist(), published):
                self._share(row, unit, node, step)
        if len(chain.nodes) < len(keys):
            self._stand_at(row, self._insert(row, keys, len(chain.nodes)))
        while self.index.full and self.index.evict():
            pass

    def _stand_at(self, row: int, nodes: np.ndarray) -> None:
        """A row's chain goes on over ``nodes``."""
        self.index.enter(int(nodes[-1]))
        self.index.leave(self._last(row))
        self._chains[row].nodes = np.concatenate([self._chains[row].nodes, nodes])

    def _insert(self, row: int, keys: np.ndarray, first: int) -> np.ndarray:
        lanes, stop = [], len(keys)
        for index in self.growing:
            grain, group = self.grains[index], self.groups[index]
            grains = np.arange(first * grain.per_unit, stop * grain.per_unit)
            pages = group.table[row, grains * grain.tokens // group.layout.block_tokens]
            lanes.append(pages.reshape(stop - first, grain.per_unit).T)
        pages = np.concatenate(lanes) if lanes else np.zeros((0, stop - first), np.int32)
        return self.index.insert(self._last(row), keys[first:], pages)

    def _share(self, row: int, unit: int, node: int, step: int | None) -> None:
        """Another request published this unit first: hold its pages, and stand on them once a whole
        block is there.
        """
        for index in self.growing:
            self._keep_extra(row, index, np.array([node]), unit)
            grain, group = self.grains[index], self.groups[index]
            for lane in grain.lanes:
                stop = unit * self._unit + (lane - grain.lanes.start + 1) * grain.tokens
                page = int(self.index.pages[lane, node])
                if stop % group.layout.block_tokens == 0 and page in self._chains[row].extra[index]:
                    self._stand_on(row, index, stop // group.layout.block_tokens - 1, page, step)

    def _stand_on(self, row: int, index: int, block: int, page: int, step: int | None) -> None:
        """Trade the row's own page of a block for the equal one that the index has."""
        extra = self._chains[row].extra[index]
        extra.discard(page)
        own = self.groups[index].swap(row, block, page)
        if self.pool.uses(own)[0]:
            extra.add(own)
        else:
            self.pool.release(own, step)

    def take_promises(self, row: int, n: int) -> dict[int, dict[int, Promise]]:
        """By checkpoint up to ``n`` tokens and by group, the pages kept for it, handed over with
        their references.
        """
        marks = sorted(
            {
                mark
                for index in self.bounded
                for mark in self.groups[index].promised_marks(row)
                if mark <= n
            }
        )
        return {
            mark: {index: self.groups[index].take_promise(row, mark) for index in self.bounded}
            for mark in marks
        }

    def next_promise(self, row: int) -> int:
        """The first checkpoint of a row whose pages are being kept, else NEVER."""
        return min(
            (mark for index in self.bounded for mark in self.groups[index].promised_marks(row)),
            default=NEVER,
        )

    def promise(self, row: int, n: int, mark: int) -> dict[int, Promise] | None:
        """Pages that resuming at ``mark`` needs, from tables that have ``n`` tokens; None where
        something is gone.
        """
        found = {}
        for index in self.bounded:
            group = self.groups[index]
            group.settle(row, n)
            blocks = group.blocks_needed(mark)
            kept = index in self.rolling and self.kept_at[row] == mark
            pages = group.kept_pages(row, blocks) if kept else group.pages_of(row, blocks)
            if pages is None:
                return None
            found[index] = Promise(blocks=blocks, pages=pages)
        return found

    def claim(self, row: int, n: int, promises: dict[int, Promise]) -> None:
        """Make the chain's node at ``n`` tokens a resume point."""
        nodes = self._chains[row].nodes
        node = int(nodes[n // self._unit - 1])
        if self.index.is_resume_point(node):
            return
        parts = [self._claim_of(index, n, promises[index], nodes) for index in self.bounded]
        self.index.claim(
            node,
            Claim(
                lanes=np.concatenate([part.lanes for part in parts]),
                nodes=np.concatenate([part.nodes for part in parts]),
                pages=np.concatenate([part.pages for part in parts]),
            ),
        )

    def _claim_of(self, index: int, n: int, promise: Promise, nodes: np.ndarray) -> Claim:
        grain, group = self.grains[index], self.groups[index]
        grains = blocks_in(group.law.needs(n), grain.tokens)
        blocks = grains * grain.tokens // group.layout.block_tokens
        pages = promise.pages[np.searchsorted(promise.blocks, blocks)]
        units = grains * grain.tokens // self._unit
        return Claim(
            lanes=grain.lane(grains).astype(np.int32),
            nodes=nodes[units],
            pages=pages.astype(np.int32),
        )

    # -- leaving -----------------------------------------------------------------------------------

    def touch(self, row: int, *, hit: bool = False) -> None:
        """Note that a row's chain has just been of use."""
        self.index.touch(self._chains[row].nodes, hit=hit)

    def clear(self, row: int, step: int | None) -> None:
        """Let go of everything a row holds; pages that a step in flight may touch wait for its
        receipt.
        """
        chain = self._chains.pop(row)
        self._forget_kept(row)
        for index, group in enumerate(self.groups):
            self.pool.release(group.clear(row), step)
            self.pool.release(np.array(sorted(chain.extra[index]), np.int32), step)
        if len(chain.nodes):
            self.index.leave(int(chain.nodes[-1]))
            self.index.offer_chain(chain.nodes)

    def check(self) -> None:
        """Assert every invariant, from scratch."""
        self.pool.check()
        self.index.check(
            np.concatenate([group.kept[group.kept != NO_PAGE] for group in self.groups])
        )
        assert (
            self.kept_at[[row for row in range(len(self.kept_at)) if row not in self._chains]] == 0
        ).all()
        references: dict[int, int] = {}
        for row, chain in self._chains.items():
            for index, group in enumerate(self.groups):
                for page in (*group.held_pages(row).tolist(), *chain.extra[index]):
                    references[page] = references.get(page, 0) + 1
        pages = np.array(sorted(references), np.int32)
        counted = np.array([references[page] for page in pages.tolist()], np.int32)
        assert (self.pool.references(pages) == counted + self.pool.in_flight(pages)).all(), (
            "every reference has a holder"
        )
