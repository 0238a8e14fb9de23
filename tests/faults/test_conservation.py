"""Pages that are never freed, freed twice, miscounted, or waited for in a circle.

Protects: free + cached + held + in flight = total after every operation, whatever ends a request;
    and somebody always finishes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from octavo.base import NO_PAGE, CapacityError
from octavo.cache.manager import Admission, Refusal
from octavo.memory.layout import ArenaLayout
from octavo.memory.pool import PagePool
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sim.model import ToyGroup
from tests.faults.toy import ALL_LAWS, Toy, full, layout_of, state, window


def counts(toy: Toy) -> tuple[Any, ...]:
    """Everything the pool counts."""
    return (
        *(toy.pool.counts(bucket) for bucket in range(len(toy.layout.arena.page_units))),
        toy.pool.free_slabs,
    )


def test_abort_before_allocation_leaves_no_trace_of_the_lookup() -> None:
    """A request that has looked its prefix up and could not start yet is aborted: no reference, no
    lock, no row remains.
    """
    toy = Toy(layout_of(full(), window(8)), seqs=1)
    prompt = list(range(20))
    toy.serve("first", prompt)
    toy.add("running", [90] * 6, max_tokens=8)
    toy.step()
    before = counts(toy)
    toy.add("waiting", prompt)
    toy.scheduler.explain("waiting")
    toy.probe(prompt)
    toy.step()
    toy.abort("waiting")
    assert counts(toy)[:-1] == before[:-1]
    toy.run()
    toy.assert_all_free()


@pytest.mark.parametrize("groups", [(full(),), (full(), window(8)), (full(), state())])
def test_admission_that_fails_after_a_match_gives_everything_back(
    groups: tuple[ToyGroup, ...],
) -> None:
    """The prefix matched and was adopted, then the rest did not fit: the counts are what they were,
    and no copy is planned.
    """
    toy = Toy(layout_of(*groups, slabs=20), seqs=2)
    prompt = list(range(16))
    toy.serve("first", prompt, max_tokens=1)
    toy.add("holder", [90] * 32, max_tokens=4)
    toy.launch()
    request = toy.add("too much", [*prompt, *range(100, 140)], max_tokens=1)
    before = counts(toy)
    found = toy.cache.lookup(request)
    assert found.hit > 0
    assert isinstance(toy.cache.can_admit(request, found), Refusal)
    assert counts(toy) == before and toy.cache.coordinator.underway.empty
    toy.scheduler.check()
    toy.land()
    toy.run()
    toy.assert_all_free()


def test_a_hundred_chunked_requests_leave_nothing_held() -> None:
    """128 prompts in chunks, with states and checkpoints: usage goes back to zero."""
    toy = Toy(layout_of(full(), state(), slabs=80), budget=11, checkpoint_interval=8)
    rng = Random(5)
    for i in range(128):
        toy.add(f"r{i}", [rng.randrange(3) for _ in range(rng.randint(5, 16))], max_tokens=1)
    toy.run(depth=2)
    toy.assert_all_free()


@pytest.mark.parametrize("groups", [(full(), window(8)), (full(), state()), ALL_LAWS])
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_reaches_a_request_at_every_stage(
    groups: tuple[ToyGroup, ...], in_flight: bool
) -> None:
    """In the middle of a chunked prompt (before and after each chunk), while decoding, and waiting
    behind a live head.
    """
    for chunk in range(1, 7):
        toy = Toy(layout_of(*groups), budget=8, seqs=2)
        toy.add("victim", list(range(30)), max_tokens=5)
        toy.add("second", [7] * 9)
        toy.add("tail", [8] * 9)
        for _ in range(chunk):
            toy.step()
        if in_flight:
            toy.launch()
        if not toy.requests["victim"].finished:
            toy.abort("victim")
        if not toy.requests["tail"].finished:
            toy.abort("tail")
        assert toy.requests["victim"].finished
        while toy.flights:
            toy.land()
        toy.run()
        assert toy.requests["second"].finished
        toy.assert_all_free()


def test_a_page_in_several_roles_of_one_request_is_freed_once() -> None:
    """A window as long as a block, checkpoints often: a page is ring, promise and index entry at
    once. Everything it is freed from counts once, and the free list holds each page once.
    """
    for depth in (1, 2):
        toy = Toy(layout_of(window(4), slabs=8), budget=5, seqs=2, checkpoint_interval=4)
        toy.serve("a", list(range(24)), marks=(4, 8, 12, 16, 20))
        toy.add("b", [*range(16), 90, 91, 92], max_tokens=7)
        toy.run(depth=depth)
        toy.assert_all_free()
        assert toy.pool.free_slabs == 8


def test_releasing_twice_or_what_is_free_raises_and_changes_nothing() -> None:
    """A list with a page twice, a page that is free, or no page at all never reaches the free
    list.
    """
    pool = PagePool(ArenaLayout(unit_bytes=64, slab_units=2, num_slabs=4, page_units=(1,)))
    pages = pool.allocate(0, 3)
    gone = pages[:1]
    pool.release(gone)
    for bad in (
        np.repeat(pages[1:2], 2),
        gone,
        np.array([-1], np.int32),
        np.concatenate([pages[1:], gone]),
    ):
        before = (pool.counts(0), pool.free_slabs)
        with pytest.raises(AssertionError):
            pool.release(bad)
        assert (pool.counts(0), pool.free_slabs) == before
        pool.check()
    pool.release(pages[1:])
    assert pool.free_slabs == 4


@pytest.mark.parametrize("length", range(1, 41))
def test_a_page_wider_than_the_window_still_leaves_a_resume_point(length: int) -> None:
    """Pages of 8 tokens, a window of 4: at whatever length a prompt ends, its last resume point has
    its whole window.
    """
    toy = Toy(layout_of(full(8), window(4, 8), slabs=40))
    prompt = [i % 5 for i in range(length)]
    toy.serve("first", prompt, max_tokens=1)
    expected = (length - 1) // 4 * 4
    assert toy.hit(prompt[:expected]) == expected
    assert all(hit <= 4 * (i + 1) for i, hit in enumerate(toy.warm_hits(prompt)))
    assert toy.serve("again", prompt, max_tokens=1).num_cached_tokens == expected


def test_a_window_that_is_gone_does_not_take_full_attention_with_it() -> None:
    """Far from any checkpoint the window keeps nothing and full attention everything: the match
    stays whole, siblings share it, and after the last resume point has been let go full pages still
    count as matched.
    """
    toy = Toy(layout_of(full(), window(4)))
    prompt = list(range(32))
    toy.serve("first", prompt, max_tokens=1, marks=(16,))
    index, windows = toy.cache.coordinator.index, toy.cache.coordinator.grains[1].lanes
    nodes = toy.probe(prompt).match.nodes
    kept = index.pages[windows][:, nodes] != NO_PAGE
    assert kept.sum() < len(nodes) and (index.pages[0][nodes] >= 0).all()
    middle = toy.probe([*prompt[:20], 90])
    assert (middle.matched, middle.hit) == (20, 16)
    index.give_up(int(nodes[3]))
    middle = toy.probe([*prompt[:20], 90])
    assert (middle.matched, middle.hit) == (20, 0)
    toy.add("sibling", [*prompt[:20], 90])
    plan = toy.step()
    assert int(np.count_nonzero(plan.groups[0].write_page >= 0)) == 1, (
        "only the new token is written"
    )
    toy.run()


def test_the_second_of_two_that_computed_the_same_stands_on_what_is_indexed() -> None:
    """Both compute the same prefix in the same steps. The first receipt publishes; the second
    request then holds the *indexed* pages, and when the first is gone and memory is short those
    stay.
    """
    toy = Toy(layout_of(full(), window(4), slabs=24), budget=64, seqs=3)
    shared = list(range(12))
    toy.add("first", [*shared, 1, 2, 3, 4, 5, 6, 7], max_tokens=2)
    toy.add("second", [*shared, 9], max_tokens=12)
    plan = toy.launch()
    assert plan is not None and plan.start.tolist() == [0, 0], "both compute it"
    mine = [toy.pages_of(name, 0) for name in ("first", "second")]
    assert not set(mine[0].values()) & set(mine[1].values())
    toy.land()
    assert [toy.pages_of("second", 0)[block] for block in range(3)] == [
        mine[0][block] for block in range(3)
    ]
    toy.step()
    assert toy.requests["first"].finished
    for i in range(3):
        toy.add(f"pressure {i}", [50 + i] * 20, max_tokens=1)
        toy.step()
    toy.run()
    toy.assert_all_free()


@pytest.mark.parametrize(("more", "fits"), [(12, False), (4, True)])
def test_cached_pages_that_a_request_hits_are_not_free_for_it_too(more: int, fits: bool) -> None:
    """Five pages, three of them cached, all reclaimable. A request that hits the three and needs
    three more does not fit; one that needs one more does (a page is set aside for copying the last
    shared block).
    """
    toy = Toy(layout_of(full(), slabs=5))
    toy.serve("first", list(range(12)), max_tokens=1)
    assert toy.cached() == [3]
    tokens = [*range(12), *range(50, 50 + more)]
    request = Request(request_id="next", prompt_token_ids=tokens, params=SamplingParams())
    found = toy.cache.lookup(request)
    assert found.hit == 12
    assert isinstance(toy.cache.can_admit(request, found), Admission) is fits
    assert not toy.cache.running(request)


@pytest.mark.parametrize(
    ("slabs", "first", "second"),
    [(7, (16, 4), (12, 4)), (9, (12, 16), (12, 12)), (8, (16, 8), (16, 8))],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_two_that_want_their_last_page_at_once_both_finish(
    slabs: int, first: tuple[int, int], second: tuple[int, int], depth: int
) -> None:
    """Both are in, memory is full, both need one page more: one gives way, nobody waits for the
    other for ever.
    """
    toy = Toy(layout_of(full(), slabs=slabs), budget=64, seqs=2)
    toy.add("a", [1] * first[0], max_tokens=first[1])
    toy.add("b", [2] * second[0], max_tokens=second[1])
    toy.run(depth=depth)
    toy.assert_all_free()


def test_cached_prefixes_of_both_do_not_deadlock_their_rests() -> None:
    """Nine pages, three cached for each of two requests that need seven and six: their prefixes
    alone leave too little for either rest. Somebody finishes, then the other.
    """
    toy = Toy(layout_of(full(), slabs=9), budget=64, seqs=2)
    for name, token in (("a", 1), ("b", 2)):
        toy.serve(f"{name} before", [token] * 12, max_tokens=1)
    toy.add("a", [1] * 25, max_tokens=3)
    toy.add("b", [2] * 21, max_tokens=3)
    toy.run()
    assert toy.requests["a"].finished and toy.requests["b"].finished
    toy.assert_all_free()


def test_what_can_never_fit_is_refused_at_once_with_the_arithmetic() -> None:
    """No request is prefilled to 99 % and then stuck: one that could never be served alone is
    refused when it comes, and the largest that is not refused finishes.
    """
    layout = layout_of(full(), state(256), slabs=10)
    largest = 0
    for total in range(4, 60):
        toy = Toy(layout)
        try:
            toy.add("r", [1] * (total - 3), max_tokens=3)
        except CapacityError as refusal:
            assert "pages of" in str(refusal) and "10 slabs" in str(refusal)
            assert not toy.scheduler.has_work
            break
        toy.run()
        largest = total
        toy.assert_all_free()
    assert largest >= 24, "all but a block per group can be used"
