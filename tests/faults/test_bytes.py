"""Stale bytes, and pages that change hands too early.

Protects: nobody ever reads what it did not write or adopt, shared pages never change, and a page is
nobody else's until every step that may touch it has been received.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from octavo.base import NO_PAGE
from octavo.sched.step import StepPlan
from octavo.sim.model import ToyGroup
from tests.faults.toy import ALL_LAWS, Toy, full, layout_of, state, window


def touched(plan: StepPlan) -> set[int]:
    """Pages that a step reads or writes."""
    pages: set[int] = set()
    for step in plan.groups:
        pages |= set(step.table[step.rows].reshape(-1).tolist()) | set(step.write_page.tolist())
    return pages - {NO_PAGE}


@pytest.mark.parametrize("groups", [(state(),), (full(), state()), (full(), window(8)), ALL_LAWS])
def test_leftovers_of_a_former_owner_are_never_read(groups: tuple[ToyGroup, ...]) -> None:
    """All pages that are free are poisoned between requests: the next owner must not notice, from
    its first step on.
    """
    toy = Toy(layout_of(*groups, slabs=40), budget=5)
    for i in range(6):
        toy.serve(f"r{i}", [i, *range(3, 20)], max_tokens=9)
        if i % 2:
            toy.cache.clear_prefixes()
        toy.poison_free()
    assert toy.runner.entries_read > 0
    toy.assert_all_free()


def test_a_page_that_changes_groups_carries_nothing_over() -> None:
    """Slabs pass from wide states to narrow attention pages and back; what lay there in the other
    layout is never read as numbers. (That masked rows may hold NaN in the kernels is tested with
    the attention operations.)
    """
    toy = Toy(layout_of(full(4, 64), state(640), slabs=8), budget=6, seqs=2)
    owners: dict[int, set[int]] = {}

    def look(plan: StepPlan) -> None:
        slabs = toy.pool.snapshot().slab_bucket
        for slab in range(len(slabs)):
            owners.setdefault(slab, set()).add(int(slabs[slab]))

    rng = Random(1)
    for i in range(12):
        toy.add(f"r{i}", [rng.randrange(9) for _ in range(rng.choice((3, 18)))], max_tokens=3)
    toy.run(look=look)
    assert any({0, 1} <= seen for seen in owners.values()), "a slab must have served both groups"
    toy.assert_all_free()


@pytest.mark.parametrize("unit", [2, 4, 8])
def test_short_continuations_of_a_shared_prefix_leave_it_unchanged(unit: int) -> None:
    """Two requests go on from one cached prefix with two tokens each: what they share is byte for
    byte what it was, both are as if computed alone, and a block shared in part is copied before it
    is written.
    """
    toy = Toy(layout_of(full(8), window(6, 8), state(), unit=unit))
    prefix = list(range(3, 15))
    toy.serve("owner", [*prefix, 90, 91], max_tokens=1, marks=(12,))
    shared = {
        page: list(shadow.rows)
        for page, shadow in toy.runner.arena.pages.items()
        if toy.pool.uses(page)[0]
    }
    groups = {page: shadow.group for page, shadow in toy.runner.arena.pages.items()}
    before = {page: rows[: toy.indexed_rows(groups[page], page)] for page, rows in shared.items()}
    toy.add("left", [*prefix, 1, 2], max_tokens=2)
    toy.add("right", [*prefix, 2, 1], max_tokens=2)
    toy.run()
    assert {toy.requests[name].num_cached_tokens for name in ("left", "right")} == {
        12 // unit * unit
    }
    for page, rows in before.items():
        shadow = toy.runner.arena.page(page)
        assert rows and shadow is not None and shadow.rows[: len(rows)] == rows
    assert bool(any(plan.copies for plan in toy.plans)) == (unit < 8), (
        "12 tokens end inside a block of 8; 8 do not"
    )


def test_windows_are_let_go_by_what_is_computed_not_by_what_is_planned() -> None:
    """Two prefill steps in flight: the pages that the unreceived ones read stay untouched and
    unfree until their receipts, though the plan is already beyond them.
    """
    toy = Toy(layout_of(full(), window(8), slabs=40), budget=6, seqs=2, enable_prefix_caching=False)
    request = toy.add("long", list(range(40)))
    toy.step()
    toy.step()
    for _ in range(2):
        first, second = toy.launch(), toy.launch()
        assert first is not None and second is not None
        assert toy.cache.computed(request) + 12 == toy.cache.scheduled(request)
        group = toy.layout.groups[1].group.law
        manager_block = toy.layout.groups[1].block_tokens
        for plan in (first, second):
            for start, stop in group.needs(int(plan.start[0])):
                for position in range(start, stop):
                    step = plan.groups[1]
                    page = int(step.table[step.rows[0], step.column(position // manager_block)])
                    assert toy.pool.references(page)[0] > 0, "read by a step in flight, and free"
        toy.land()
        toy.land()
    toy.run()
    toy.assert_all_free()


def test_a_step_in_flight_keeps_the_pages_of_a_request_that_is_gone() -> None:
    """A is aborted while two of its steps are in flight and may still write. B, in dire need, gets
    none of A's pages until the receipts are in, and all of them afterwards.
    """
    toy = Toy(layout_of(full(), slabs=10), budget=8, seqs=2, enable_prefix_caching=False)
    toy.add("zombie", list(range(20)))
    flying = [toy.launch(), toy.launch()]
    assert all(plan is not None for plan in flying)
    toy.abort("zombie")
    dangerous = set().union(*(touched(plan) for plan in flying if plan is not None))
    toy.add("heir", list(range(30)), max_tokens=2)
    plan = toy.launch()
    assert plan is None or not touched(plan) & dangerous
    assert toy.held()[0] >= len(dangerous)
    while toy.flights:
        toy.land()
    toy.run()
    assert any(touched(plan) & dangerous for plan in toy.plans[3:]), (
        "10 pages, 8 of them for the heir: some were the zombie's"
    )
    toy.assert_all_free()


def test_what_somebody_is_still_sending_is_no_victim() -> None:
    """Cached pages that are held and pinned (as a sender would) survive any eviction unmoved and
    unchanged, and are free to go afterwards.
    """
    toy = Toy(layout_of(full(), window(8), slabs=12, slab_pages=2), seqs=2)
    prompt = list(range(12))
    toy.serve("sent", prompt)
    coordinator = toy.cache.coordinator
    pages = np.unique(
        coordinator.index.pages[0][
            coordinator.lookup(toy.cache.keys(toy.requests["sent"], 12), 3).nodes
        ]
    )
    toy.pool.retain(pages)
    toy.pool.pin(pages)
    before = {page: list(toy.runner.arena.pages[page].rows) for page in pages.tolist()}
    for i in range(6):
        toy.serve(f"r{i}", [50 + i] * 30)
    assert coordinator.index.evicted_nodes > 0 and toy.hit(prompt) == 0, "its keys had to go"
    assert {page: list(toy.runner.arena.pages[page].rows) for page in before} == before
    toy.pool.check()
    toy.pool.unpin(pages)
    toy.pool.release(pages)
    toy.assert_all_free()


@pytest.mark.parametrize("seed", range(4))
def test_eviction_pressure_never_shows(seed: int) -> None:
    """Six requests at a time over a pool of a few pages, two steps in flight, aborts and lost
    steps: every read is checked.
    """
    rng = Random(seed)
    toy = Toy(
        layout_of(full(), window(6), unit=2, slabs=rng.choice((14, 18)), max_model_len=40),
        budget=9,
        seqs=6,
    )
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 24))] for _ in range(8)]
    for i in range(24):
        prompt = rng.choice(prompts)[: rng.randint(1, 24)] + [rng.randrange(2)] * rng.randint(1, 4)
        toy.add(f"r{i}", prompt, max_tokens=rng.randint(1, 8))
        for _ in range(rng.randint(0, 3)):
            lost = any(result.failed for _, result in toy.flights) or rng.random() < 0.05
            idle = len(toy.flights) < 2 and toy.launch(lost=lost) is None
            if toy.flights and (idle or rng.random() < 0.6):
                toy.land()
        alive = [name for name, request in toy.requests.items() if not request.finished]
        if alive and rng.random() < 0.1:
            toy.abort(rng.choice(alive))
    while toy.flights:
        toy.land()
    toy.run(depth=2)
    assert toy.cache.coordinator.index.evicted_nodes > 0
    toy.assert_all_free()
