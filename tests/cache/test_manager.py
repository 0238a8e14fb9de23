"""The cache as the scheduler sees it: who hits what, what is refused, what a steady step costs."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest

from octavo.base import CapacityError, ConfigError
from octavo.cache.manager import Admission, KVCacheManager
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.sim.model import ToyGroup, toy_layout
from octavo.spec.law import Everything
from tests.cache.drive import gemma_layout, make_request, run


def scheduler_for(**more: int) -> Scheduler:
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 8, **more}
    return Scheduler(gemma_layout(), **options)  # type: ignore[arg-type]


def serve(scheduler: Scheduler, name: str, tokens: list[int], **more: object) -> int:
    """Run one request to its end; returns the tokens it found in the cache."""
    request = make_request(name, tokens, **more)  # type: ignore[arg-type]
    scheduler.add(request)
    run(scheduler)
    scheduler.check()
    return request.num_cached_tokens


def test_a_resend_hits_all_but_the_last_unit() -> None:
    scheduler = scheduler_for()
    tokens = list(range(1000, 3000))
    assert serve(scheduler, "first", tokens) == 0
    assert serve(scheduler, "again", tokens) == 1984
    explained = scheduler.explain("again")
    assert (
        explained is not None
        and explained.hit_tokens == 1984
        and explained.reason == "everything that may be reused was"
    )


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    scheduler = scheduler_for()
    tokens = list(range(1024))
    serve(scheduler, "first", tokens)
    assert serve(scheduler, "again", tokens) == 1008


def test_the_next_turn_hits_the_end_of_the_last_one() -> None:
    scheduler = scheduler_for()
    first = list(range(700))
    serve(scheduler, "turn 1", first, max_tokens=400)
    assert (
        serve(scheduler, "turn 2", [*first, *[7] * 400, *range(50)]) == (700 + 400 - 1) // 16 * 16
    )


def test_the_second_sibling_of_an_announced_prefix_hits_it_and_the_third_in_any_case() -> None:
    shared = list(range(2000))
    announced = scheduler_for()
    hits = [
        serve(announced, f"r{i}", [*shared, *[9000 + i] * 300], marks=(2000,)) for i in range(3)
    ]
    assert hits == [0, 2000, 2000]
    silent = scheduler_for()
    hits = [serve(silent, f"r{i}", [*shared, *[9000 + i] * 600]) for i in range(3)]
    assert hits == [0, 0, 2000]


def test_explain_names_the_limiting_group() -> None:
    scheduler = scheduler_for()
    serve(scheduler, "first", list(range(3000)))
    serve(scheduler, "sibling", [*range(2000), *[5] * 100])
    explained = scheduler.explain("sibling")
    assert explained is not None
    assert (explained.hit_tokens, explained.matched_tokens, explained.limited_by) == (
        0,
        2000,
        ("window 512",),
    )
    assert "no checkpoint between tokens 0 and 2000" in explained.reason


def test_explain_says_where_the_key_differs() -> None:
    scheduler = scheduler_for()
    serve(scheduler, "first", list(range(3000)), marks=(480,))
    serve(scheduler, "other", [*range(490), *[5] * 100])
    explained = scheduler.explain("other")
    assert (
        explained is not None
        and explained.hit_tokens == 480
        and "tokens 480 to 496" in explained.reason
    )


@pytest.mark.parametrize("other", [{"cache_salt": "b"}])
def test_a_different_salt_never_shares(other: dict[str, str]) -> None:
    scheduler = scheduler_for()
    tokens = list(range(600))
    serve(scheduler, "first", tokens, cache_salt="a")
    assert serve(scheduler, "other", tokens, **other) == 0
    assert serve(scheduler, "same", tokens, cache_salt="a") == 592


@pytest.mark.parametrize("change", [{"hash_seed": 1}, {"model_digest": b"other"}])
def test_keys_change_with_all_that_changes_bytes(change: dict[str, object]) -> None:
    keys = []
    for options in ({}, change):
        scheduler = Scheduler(gemma_layout(), max_num_batched_tokens=64, max_num_seqs=1, **options)  # type: ignore[arg-type]
        keys.append(scheduler.cache.keys(make_request("r", list(range(64))), 64).tolist())
    assert not set(keys[0]) & set(keys[1])


def test_a_request_that_could_never_fit_is_refused_with_the_arithmetic() -> None:
    scheduler = Scheduler(
        gemma_layout(arena_bytes=24 << 20), max_num_batched_tokens=512, max_num_seqs=2
    )
    with pytest.raises(CapacityError, match=r"30,001 tokens needs .* slabs"):
        scheduler.add(make_request("huge", [1] * 30_000, max_tokens=100))
    assert not scheduler.has_work
    with pytest.raises(CapacityError, match="max_model_len"):
        scheduler.add(make_request("long", [1] * 32_768))


def test_an_empty_prompt_and_a_taken_id_are_errors() -> None:
    with pytest.raises(ConfigError, match="empty"):
        make_request("none", [])
    scheduler = scheduler_for()
    scheduler.add(make_request("r", [1]))
    with pytest.raises(ConfigError, match="in use"):
        scheduler.add(make_request("r", [2]))


@pytest.mark.parametrize("size", [16, 256])
def test_a_decode_step_inside_blocks_costs_no_python_per_request_in_the_cache(size: int) -> None:
    """The number of calls is the same for 16 and for 256 requests: a small constant."""
    layout = gemma_layout(arena_bytes=8 << 30, max_model_len=2048)
    scheduler = Scheduler(
        layout, max_num_batched_tokens=1 << 16, max_num_seqs=size, enable_prefix_caching=False
    )
    for i in range(size):
        scheduler.add(make_request(f"r{i}", [i] * 70, max_tokens=40))
    for _ in range(3):
        plan = scheduler.schedule()
        assert isinstance(plan, StepPlan)
        scheduler.commit(StepResult(step=plan.step, tokens=dict.fromkeys(plan.request_ids, 7)))
    manager = scheduler.cache
    rows = plan.groups[1].rows.astype("int64")
    calls = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (
            "octavo/cache/" in frame.f_code.co_filename
            or "octavo/memory/" in frame.f_code.co_filename
        ):
            calls.append(frame.f_code.co_name)

    sys.setprofile(trace)
    try:
        assert manager.decode(rows, 99).all()
        manager.take_step(rows, plan.stop.astype("int64"), plan.query_start)
        manager.commit(rows, plan.stop.astype("int64") + 1)
    finally:
        sys.setprofile(None)
    assert len(calls) < 40, calls


def admit(manager: KVCacheManager, request: Request) -> None:
    admission = manager.can_admit(request, manager.lookup(request))
    assert isinstance(admission, Admission)
    manager.admit(admission)


def test_admission_is_exact_behind_a_hit_that_ends_on_a_block_border() -> None:
    """Five pages: three hold a cached prefix, two are free, and a prompt of five blocks takes all
    of them.
    """
    layout = toy_layout(
        [ToyGroup(law=Everything(), block_tokens=4)],
        hash_unit=4,
        slab_pages=1,
        num_slabs=5,
        max_model_len=24,
    )
    manager = KVCacheManager(layout, max_num_seqs=2)
    first, longer = (
        make_request("first", list(range(12))),
        make_request("longer", [*range(12), *range(50, 58)]),
    )
    for request, stop in ((first, 12), (longer, 20)):
        admit(manager, request)
        assert manager.extend(request, stop, 0)
        manager.commit(np.array([manager.row(request)]), np.array([stop]))
        if request is first:
            manager.free(request)
    assert (
        manager.coordinator.pool.counts(0).held == 5
        and manager.coordinator.index.evicted_nodes == 0
    )
    manager.check()


def test_two_requests_that_compute_one_block_together_end_on_one_page() -> None:
    """Each publishes half of the block first: both keep what the index has, and everything comes
    back.
    """
    layout = toy_layout(
        [ToyGroup(law=Everything(), block_tokens=8)],
        hash_unit=4,
        slab_pages=1,
        num_slabs=6,
        max_model_len=24,
    )
    manager = KVCacheManager(layout, max_num_seqs=2)
    pair = [make_request(name, list(range(9))) for name in ("a", "b")]
    for request in pair:
        admit(manager, request)
    for request, stop in ((pair[0], 4), (pair[1], 8), (pair[0], 8)):
        assert manager.extend(request, stop, 0)
        manager.commit(np.array([manager.row(request)]), np.array([stop]))
        manager.check()
    tables = [manager.coordinator.groups[0].table[manager.row(request), 0] for request in pair]
    assert tables[0] == tables[1]
    for request in pair:
        manager.free(request)
        manager.receive(0)
        manager.check()
    pool = manager.coordinator.pool
    assert pool.counts(0).held == pool.counts(0).limbo == 0
    manager.clear_prefixes()
    assert pool.free_slabs == 6
