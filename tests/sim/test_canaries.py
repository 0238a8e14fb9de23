"""Planted bugs: each breaks one rule of the cache, and a handful of seeds finds each.

Owns the bugs. A simulator that cannot find them proves nothing when it is silent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.base import NO_PAGE
from octavo.cache.coordinator import KVCacheCoordinator
from octavo.cache.hits import Hits, Match
from octavo.cache.index.tree import PrefixIndex
from octavo.cache.manager import KVCacheManager, Lookup
from octavo.cache.rolling import RollingCheckpoints, Trades
from octavo.cache.tables import AppendTable, GroupTable, RingTable
from octavo.cache.underway import StepUnderway
from octavo.memory.pool import PagePool
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler, _Part, _Queued
from octavo.sched.step import CopyJob
from octavo.sim.world import SimulationError, run

SEEDS = range(40)

Plant = Callable[[pytest.MonkeyPatch], None]


def window_block_let_go_early(patch: pytest.MonkeyPatch) -> None:
    """The oldest token of a bounded law is forgotten one token too soon."""
    needed = GroupTable.blocks_needed

    def early(self: GroupTable, n: int) -> np.ndarray:
        return needed(self, n + 1 if self.law.prefix is not None else n)

    patch.setattr(GroupTable, "blocks_needed", early)


def published_before_the_receipt(patch: pytest.MonkeyPatch) -> None:
    """Units are offered to others as soon as the step that will write them is planned."""
    extend = KVCacheManager.extend

    def eager(
        self: KVCacheManager, request: Request, stop: int, step: int, *, checkpoints: bool = True
    ) -> bool:
        fits = extend(self, request, stop, step, checkpoints=checkpoints)
        row = self._rows[request.request_id]
        if fits and row.publishes:
            self.coordinator.publish(row.row, self.keys(request, stop), step)
        return fits

    patch.setattr(KVCacheManager, "extend", eager)


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    """A request writes into the shared pages it began on."""
    for table in (AppendTable, RingTable):
        adopt = table.adopt

        def owning(
            self: GroupTable,
            row: int,
            blocks: np.ndarray,
            *rest: Any,
            adopt: Any = adopt,
            **more: Any,
        ) -> None:
            adopt(self, row, blocks, *rest, **more)
            self.owned[row, self.layout.columns(blocks)] = True

        patch.setattr(table, "adopt", owning)


def forks_write_where_their_source_does(patch: pytest.MonkeyPatch) -> None:
    """A fork takes the pages it shares for its own."""
    for table in (AppendTable, RingTable):
        fork = table.fork

        def owning(self: GroupTable, source: int, row: int, n: int, fork: Any = fork) -> np.ndarray:
            pages = fork(self, source, row, n)
            self.owned[row] = self.table[row] != NO_PAGE
            return pages

        patch.setattr(table, "fork", owning)


def rings_turn_over_forks(patch: pytest.MonkeyPatch) -> None:
    """A ring goes on turning over pages that a fork still reads."""

    def unshared(self: PagePool, pages: np.ndarray) -> np.ndarray:
        return (self.uses(pages) == 0) & (self.in_flight(pages) == 0)

    patch.setattr(PagePool, "exclusive", unshared)


def copies_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Copy jobs, of shared blocks and of compaction, never reach the runner."""

    take = StepUnderway.take_copies

    def none(self: StepUnderway) -> tuple[CopyJob, ...]:
        take(self)
        return ()

    patch.setattr(StepUnderway, "take_copies", none)


def ring_recycles_indexed_pages(patch: pytest.MonkeyPatch) -> None:
    """A ring turns over pages that the prefix index offers to others."""
    patch.setattr(
        PagePool, "exclusive", lambda self, pages: np.ones(len(np.asarray(pages).reshape(-1)), bool)
    )


def rolling_checkpoints_stay_behind(patch: pytest.MonkeyPatch) -> None:
    """A decoding request offers what it kept at an earlier unit as what its last one needs."""
    roll = RollingCheckpoints.roll

    def once(self: RollingCheckpoints, rows: np.ndarray, n: np.ndarray, step: int) -> list[Trades]:
        first = (self.kept[rows] == NO_PAGE).all(axis=1)
        self.kept_at[rows] = n
        trades = []
        for trade in roll(self, rows[first], n[first], step):
            done = np.zeros(len(rows), bool)
            done[first] = trade.done
            trades.append(Trades(ring=trade.ring, done=done, pages=trade.pages))
        return trades

    patch.setattr(RollingCheckpoints, "roll", once)


def hit_one_unit_too_long(patch: pytest.MonkeyPatch) -> None:
    """A bounded group says it can resume one unit after where it can."""
    resumable = Hits.resumable

    def bold(self: Hits, index: int, nodes: np.ndarray, low: int, stop: int) -> np.ndarray:
        able = resumable(self, index, nodes, low, stop)
        able[1:] |= able[:-1]
        return able

    patch.setattr(Hits, "resumable", bold)


def last_token_not_computed(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is fully cached hits whole, so that nothing remains to be computed."""
    lookup = KVCacheCoordinator.lookup

    def whole(self: KVCacheCoordinator, keys: np.ndarray, limit: int) -> Match:
        return lookup(self, keys, limit + 1)

    patch.setattr(KVCacheCoordinator, "lookup", whole)


def no_limbo(patch: pytest.MonkeyPatch) -> None:
    """Pages let go are free at once, though a step in flight still reads them."""
    release = PagePool.release
    patch.setattr(PagePool, "release", lambda self, pages, step=None: release(self, pages))


def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    """Tenants share cached prefixes."""
    keys = KVCacheManager.keys

    def unsalted(self: KVCacheManager, request: Request, n: int) -> list[bytes]:
        salt, request.cache_salt = request.cache_salt, ""
        found = keys(self, request, n)
        request.cache_salt = salt
        return found

    patch.setattr(KVCacheManager, "keys", unsalted)


def lost_steps_believed(patch: pytest.MonkeyPatch) -> None:
    """What a failed step would have written is published when its requests are preempted."""
    free = KVCacheManager.free

    def trusting(
        self: KVCacheManager, request: Request, *, in_flight: bool = False, publish: bool = True
    ) -> None:
        row = self._rows[request.request_id].row
        if not publish:
            self._computed[row] = self._scheduled[row]
        free(self, request, in_flight=in_flight, publish=True)

    patch.setattr(KVCacheManager, "free", trusting)


def references_leak(patch: pytest.MonkeyPatch) -> None:
    """The end of a request forgets its last page."""
    referred = KVCacheCoordinator.referred_pages
    clear = KVCacheCoordinator.clear

    def careless(self: KVCacheCoordinator, row: int, step: int | None) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                KVCacheCoordinator,
                "referred_pages",
                lambda self, row, group: referred(self, row, group)[:-1],
            )
            clear(self, row, step)

    patch.setattr(KVCacheCoordinator, "clear", careless)


def moves_hidden_from_the_index(patch: pytest.MonkeyPatch) -> None:
    """Compaction does not tell the prefix index where its pages went."""
    patch.setattr(PrefixIndex, "remap", lambda self, moved: None)


def preempted_requests_starve(patch: pytest.MonkeyPatch) -> None:
    """A request that lost its pages is never started again."""
    start = Scheduler._start

    def choosy(
        self: Scheduler, queued: _Queued, found: Lookup, step: int, budget: int
    ) -> _Part | None:
        return None if queued.request.num_preemptions else start(self, queued, found, step, budget)

    patch.setattr(Scheduler, "_start", choosy)


PLANTS: tuple[tuple[Plant, str], ...] = (
    (window_block_let_go_early, "blocks are held|reads tokens|out of bounds"),
    (published_before_the_receipt, "reads tokens|offers to others"),
    (no_copy_on_write, "offers to others"),
    (forks_write_where_their_source_does, "writes in the same step|reads tokens|offers to others"),
    (rings_turn_over_forks, "reads tokens|offers to others|not yet received"),
    (copies_forgotten, "reads tokens"),
    (ring_recycles_indexed_pages, "offers to others"),
    (rolling_checkpoints_stay_behind, "what resuming needs is kept"),
    (hit_one_unit_too_long, "a hit is warm"),
    (last_token_not_computed, "AssertionError"),
    (no_limbo, "not yet received"),
    (salt_ignored, "reads tokens"),
    (lost_steps_believed, "reads tokens"),
    (references_leak, "every reference has a holder|fits alone"),
    (moves_hidden_from_the_index, "counts every use|no pages at present"),
    (preempted_requests_starve, "wait for ever"),
)
"""Bugs, and how the first seed that meets one complains."""


@pytest.mark.parametrize(
    ("plant", "complaint"), PLANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_is_found(
    plant: Plant, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(SimulationError, match="octavo sim --seed") as caught:
        for seed in SEEDS:
            run(seed=seed)
    assert re.search(complaint, str(caught.value)), str(caught.value)
