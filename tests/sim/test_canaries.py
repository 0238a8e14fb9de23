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
from octavo.cache.coordinator import KVCacheCoordinator, Match
from octavo.cache.manager import KVCacheManager, Lookup
from octavo.cache.prefix import PrefixIndex
from octavo.cache.single_type import SingleTypeKVCacheManager
from octavo.memory.pool import PagePool
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler, _Part, _Queued
from octavo.sched.step import CopyJob
from octavo.sim.world import SimulationError, run

SEEDS = range(40)

Plant = Callable[[pytest.MonkeyPatch], None]


def window_block_let_go_early(patch: pytest.MonkeyPatch) -> None:
    """The oldest token of a bounded law is forgotten one token too soon."""
    needed = SingleTypeKVCacheManager.blocks_needed

    def early(self: SingleTypeKVCacheManager, n: int) -> np.ndarray:
        return needed(self, n + 1 if self.law.prefix is not None else n)

    patch.setattr(SingleTypeKVCacheManager, "blocks_needed", early)


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
    adopt = SingleTypeKVCacheManager.adopt

    def owning(
        self: SingleTypeKVCacheManager,
        row: int,
        n: int,
        blocks: np.ndarray,
        *rest: Any,
        **more: Any,
    ) -> None:
        adopt(self, row, n, blocks, *rest, **more)
        self._owned[row, self._columns(blocks)] = True

    patch.setattr(SingleTypeKVCacheManager, "adopt", owning)


def forks_write_where_their_source_does(patch: pytest.MonkeyPatch) -> None:
    """A fork takes the pages it shares for its own."""
    fork = SingleTypeKVCacheManager.fork

    def owning(self: SingleTypeKVCacheManager, source: int, row: int, n: int) -> np.ndarray:
        pages = fork(self, source, row, n)
        self._owned[row] = self.table[row] != NO_PAGE
        return pages

    patch.setattr(SingleTypeKVCacheManager, "fork", owning)


def rings_turn_over_forks(patch: pytest.MonkeyPatch) -> None:
    """A ring goes on turning over pages that a fork still reads."""

    def unshared(self: PagePool, pages: np.ndarray) -> np.ndarray:
        return (self.uses(pages) == 0) & (self.in_flight(pages) == 0)

    patch.setattr(PagePool, "exclusive", unshared)


def copies_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Copy jobs, of shared blocks and of compaction, never reach the runner."""

    def none(self: KVCacheManager) -> tuple[CopyJob, ...]:
        self.coordinator.jobs = []
        return ()

    patch.setattr(KVCacheManager, "take_copies", none)


def ring_recycles_indexed_pages(patch: pytest.MonkeyPatch) -> None:
    """A ring turns over pages that the prefix index offers to others."""
    patch.setattr(
        PagePool, "exclusive", lambda self, pages: np.ones(len(np.asarray(pages).reshape(-1)), bool)
    )


def rolling_checkpoints_stay_behind(patch: pytest.MonkeyPatch) -> None:
    """A decoding request offers what it kept at an earlier unit as what its last one needs."""
    keep = SingleTypeKVCacheManager.keep

    def once(
        self: SingleTypeKVCacheManager, rows: np.ndarray, n: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        first = (self.kept[rows] == NO_PAGE).all(axis=1)
        return keep(self, rows[first], n[first])

    patch.setattr(SingleTypeKVCacheManager, "keep", once)


def hit_one_unit_too_long(patch: pytest.MonkeyPatch) -> None:
    """A bounded group says it can resume one unit after where it can."""
    resumable = KVCacheCoordinator._resumable

    def bold(
        self: KVCacheCoordinator, index: int, nodes: np.ndarray, low: int, stop: int
    ) -> np.ndarray:
        able = resumable(self, index, nodes, low, stop)
        able[1:] |= able[:-1]
        return able

    patch.setattr(KVCacheCoordinator, "_resumable", bold)


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
    clear = SingleTypeKVCacheManager.clear
    patch.setattr(SingleTypeKVCacheManager, "clear", lambda self, row: clear(self, row)[:-1])


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
    (window_block_let_go_early, "blocks are held|reads tokens"),
    (published_before_the_receipt, "reads tokens|offers to others"),
    (no_copy_on_write, "offers to others"),
    (forks_write_where_their_source_does, "writes in the same step|reads tokens|offers to others"),
    (rings_turn_over_forks, "reads tokens|offers to others|not yet received"),
    (copies_forgotten, "reads tokens"),
    (ring_recycles_indexed_pages, "offers to others"),
    (rolling_checkpoints_stay_behind, "reads tokens|no page of this arena"),
    (hit_one_unit_too_long, "a hit is warm"),
    (last_token_not_computed, "AssertionError"),
    (no_limbo, "not yet received"),
    (salt_ignored, "reads tokens"),
    (lost_steps_believed, "reads tokens"),
    (references_leak, "every reference has a holder"),
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
