"""The page pool by example: what each operation promises, one at a time. Random sequences are in
test_pool_model.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.base import NO_PAGE
from octavo.memory.layout import ArenaLayout, solve_arena
from octavo.memory.pool import Counts, PagePool, PageState

TWO = ArenaLayout(unit_bytes=256, slab_units=12, num_slabs=4, page_units=(3, 2))


@pytest.fixture
def pool():
    made = PagePool(TWO)
    yield made
    made.check()


def state(pool: PagePool) -> list:
    shot = pool.snapshot()
    everywhere = np.arange(pool.layout.scratch_unit)
    return [
        shot.slab_bucket.tolist(),
        shot.states.tolist(),
        pool.references(everywhere).tolist(),
        pool.uses(everywhere).tolist(),
        pool.exclusive(everywhere).tolist(),
        pool.free_slabs,
        [pool.counts(bucket) for bucket in range(len(pool.layout.page_units))],
        [pool.shortfall([want] * len(pool.layout.page_units)) for want in range(6)],
    ]


def test_pages_are_unit_offsets_and_slabs_serve_any_bucket(pool):
    assert pool.allocate(0, 5).tolist() == [0, 3, 6, 9, 12]
    assert pool.allocate(1, 7).tolist() == [24, 26, 28, 30, 32, 34, 36]
    assert pool.counts(0) == Counts(free=3, cached=0, held=5, limbo=0)
    assert pool.counts(1) == Counts(free=5, cached=0, held=7, limbo=0)
    assert pool.free_slabs == 0
    pool.release([24, 26, 28, 30, 32, 34])
    assert pool.free_slabs == 1 and pool.counts(1).free == 5
    assert pool.allocate(0, 4).tolist() == [15, 18, 21, 24]


def test_the_fullest_slab_is_filled_first(pool):
    pages = pool.allocate(1, 18)
    pool.release(pages[[0, 1, 2, 3, 6, 7, 12]])
    assert pool.allocate(1, 1).tolist() == [24]
    assert pool.allocate(1, 3).tolist() == [12, 14, 0]


def test_cached_pages_survive_their_request_and_come_back(pool):
    pages = pool.allocate(0, 2)
    pool.keep(pages)
    pool.release(pages)
    assert pool.counts(0) == Counts(free=2, cached=2, held=0, limbo=0)
    pool.retain([pages[0], pages[0]])
    assert pool.references(pages).tolist() == [2, 0] and pool.counts(0).held == 1
    pool.release([pages[0], pages[0]])
    pool.drop(pages)
    assert pool.free_slabs == TWO.num_slabs


def test_limbo_keeps_pages_until_their_step_is_retired(pool):
    pages = pool.allocate(0, 3)
    pool.release(pages[:1], step=7)
    pool.release(pages[1:2], step=8)
    assert pool.counts(0) == Counts(free=1, cached=0, held=1, limbo=2)
    for call in (pool.release, pool.drop):
        with pytest.raises(AssertionError):
            call(pages[:1])
    assert not np.isin(pool.allocate(0, 4), pages).any()
    pool.retire(6)
    assert pool.counts(0).limbo == 2
    pool.retire(7)
    assert pool.counts(0).limbo == 1
    pool.retire(9)
    assert pool.counts(0).limbo == 0


@pytest.mark.parametrize(
    "bad",
    [[0, 0, 0], [3, NO_PAGE], [1], [6], [36], [48], [1000], [-5], [0, 6]],
    ids=lambda pages: "_".join(map(str, pages)),
)
@pytest.mark.parametrize("call", ["release", "drop", "unpin"])
def test_what_cannot_be_let_go_raises_and_changes_nothing(pool, call, bad):
    pages = pool.allocate(0, 2)
    pool.retain(pages)
    pool.keep(pages)
    pool.keep(pages)
    pool.pin(np.repeat(pages, 2))
    before = state(pool)
    with pytest.raises(AssertionError):
        getattr(pool, call)(bad)
    assert state(pool) == before


def test_pinned_pages_do_not_go_and_do_not_move(pool):
    pages = pool.allocate(0, 16)
    pool.release(pages[[1, 2, 3, 5, 6, 7]])
    pool.pin(pages[[0]])
    with pytest.raises(AssertionError, match="pinned"):
        pool.release(pages[[0]])
    assert not pool.exclusive(pages[[0]])[0]
    moves = pool.compact()
    assert moves is not None and moves.sources.tolist() == [12] and moves.targets.tolist() == [3]
    assert pool.compact() is None
    pool.unpin(pages[[0]])
    assert pool.exclusive(pages[[0]])[0]


def test_compaction_moves_counts_and_frees_a_slab_at_once(pool):
    pages = pool.allocate(0, 16)
    pool.retain(pages[[4]])
    pool.keep(pages[[4, 8]])
    pool.release(pages[[5, 6, 7, 8, 9, 10]])
    assert not pool.ready([0, 1]) and pool.fits([0, 1])
    moves = pool.compact()
    assert moves is not None and (moves.bucket, moves.units) == (0, 3)
    assert moves.sources.tolist() == [12] and moves.targets.tolist() == [27]
    assert pool.references(moves.targets).tolist() == [2] and pool.uses(moves.targets).tolist() == [
        1
    ]
    assert pool.ready([0, 6]) and pool.allocate(1, 1).tolist() == [12]


def test_compaction_takes_the_cheapest_slab_of_all_buckets(pool):
    first, second = pool.allocate(0, 8), pool.allocate(1, 12)
    pool.release(first[[0, 1, 4, 5]])
    pool.release(second[[0, 1, 2, 3, 6, 7]])
    moves = pool.compact()
    assert moves is not None and moves.bucket == 1 and len(moves.sources) == 2


def test_pages_in_limbo_count_against_admission(pool):
    pages = pool.allocate(0, 16)
    pool.release(pages, step=1)
    assert pool.shortfall([1, 0]) == 1 and not pool.ready([1, 0])
    pool.retire(1)
    assert pool.fits([16, 0]) and pool.ready([16, 0])


def test_admission_counts_pages_and_pinned_slabs(pool):
    pages = pool.allocate(0, 12)
    pool.keep(pages)
    pool.release(pages)
    assert pool.fits([16, 0]) and not pool.fits([16, 1]) and not pool.ready([16, 0])
    pool.pin(pages[[0, 4, 8]])
    assert pool.fits([9, 6]) and pool.shortfall([0, 7]) == 1 and pool.shortfall([0, 18]) == 2
    assert pool.fits([13, 0]) and pool.shortfall([14, 0]) == 1


def test_allocating_without_asking_is_an_error_and_changes_nothing(pool):
    pool.allocate(0, 13)
    before = state(pool)
    for bucket, count in ((0, 4), (1, 1), (0, -1)):
        with pytest.raises(AssertionError):
            pool.allocate(bucket, count)
    assert state(pool) == before
    assert pool.allocate(0, 0).tolist() == []


def test_empty_arrays_are_no_operation(pool):
    pool.allocate(0, 3)
    before = state(pool)
    nothing = np.zeros(0, np.int32)
    for call in (pool.retain, pool.release, pool.keep, pool.drop, pool.pin, pool.unpin):
        call(nothing)
    assert state(pool) == before


def test_probes_never_mutate(pool):
    pool.allocate(0, 5)
    before = state(pool)
    for want in range(20):
        pool.ready([want, want]), pool.fits([want, want]), pool.shortfall([want, want])
    assert state(pool) == before


def test_snapshot_names_states_and_cannot_be_written(pool):
    pages = pool.allocate(0, 3)
    pool.keep(pages[:1])
    pool.release(pages[:1])
    pool.release(pages[1:2], step=1)
    shot = pool.snapshot()
    assert shot.slab_bucket.tolist() == [0, -1, -1, -1]
    assert shot.states[0, :4].tolist() == [
        PageState.CACHED,
        PageState.LIMBO,
        PageState.HELD,
        PageState.FREE,
    ]
    with pytest.raises(ValueError, match="read-only"):
        shot.states[0, 0] = 0


def test_an_arena_of_a_large_device_is_filled_and_emptied():
    layout, (large, small) = solve_arena([15 * 2 * 64 * 512, 3 * 2 * 64 * 512], 141 * 2**30)
    pool = PagePool(layout)
    pages = [pool.allocate(large, 2000), pool.allocate(small, 300_000), pool.allocate(small, 1)]
    assert all(page.dtype == np.int32 and (page >= 0).all() for page in pages)
    assert int(max(page.max() for page in pages)) < layout.scratch_unit
    pool.check()
    for each in pages:
        pool.release(each)
    assert pool.free_slabs == layout.num_slabs
