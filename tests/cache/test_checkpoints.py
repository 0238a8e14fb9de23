"""Where requests can be resumed: behind generated tokens, inside a chunk, at announced junctions;
and what that costs.

Protects: the newest whole unit of an answer is a resume point under every law and block size; what
    it keeps is never held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.base import NO_PAGE
from octavo.cache.checkpoints import CheckpointPolicy
from octavo.sched.step import StepPlan
from octavo.sim.model import ToyGroup
from octavo.spec.law import Chunk, Law, SinkWindow, Snapshot, Tail, Window
from tests.faults.toy import Toy, full, layout_of, state, written

UNIT = 16
LAWS: tuple[tuple[Law, int], ...] = (
    (Snapshot(), 1),
    (Tail(4, 4), 4),
    (Tail(3, 2), 8),
    (Window(12), 4),
    (Window(40), 8),
    (Window(20), 32),
    (Chunk(24), 8),
    (Chunk(32), 16),
    (Chunk(20), 16),
    (SinkWindow(3, 10), 2),
)


def toy_of(*groups: ToyGroup, unit: int = UNIT, **more: int) -> Toy:
    return Toy(layout_of(*groups, unit=unit, slabs=600, max_model_len=512), budget=256, **more)


def conversation(toy: Toy, name: str) -> list[int]:
    request = toy.requests[name]
    return [*request.prompt_token_ids, *request.output_token_ids]


@pytest.mark.parametrize(("law", "block"), LAWS, ids=str)
@pytest.mark.parametrize("generated", [1, 15, 16, 17, 50])
def test_the_next_turn_goes_on_behind_the_last_whole_unit_of_the_answer(
    law: Law, block: int, generated: int
) -> None:
    toy = toy_of(full(), ToyGroup(law=law, block_tokens=block))
    toy.serve("turn 1", list(range(90)), max_tokens=generated)
    said = conversation(toy, "turn 1")
    # The last token was sampled and not computed.
    assert toy.hit([*said, 5, 6, 7]) == (len(said) - 1) // UNIT * UNIT
    turn = toy.serve("turn 2", [*said, *range(200, 230)], max_tokens=20)
    assert turn.num_cached_tokens == (len(said) - 1) // UNIT * UNIT
    toy.assert_all_free()


@pytest.mark.parametrize(("law", "block"), LAWS, ids=str)
def test_a_request_that_gives_way_in_its_answer_is_computed_again_from_there(
    law: Law, block: int
) -> None:
    toy = toy_of(full(), ToyGroup(law=law, block_tokens=block))
    request = toy.add("r", list(range(50)), max_tokens=40)
    for _ in range(26):
        toy.step()
    computed = toy.cache.computed(request)
    toy.retract("r")
    plan = toy.launch()
    assert plan is not None and int(plan.start[0]) == computed // UNIT * UNIT == 64
    toy.run()
    toy.assert_all_free()


def test_what_an_aborted_or_failed_step_wrote_is_no_resume_point() -> None:
    toy = toy_of(full(), state())
    toy.add("r", list(range(50)), max_tokens=40)
    for _ in range(14):
        toy.step()
    toy.launch(lost=True)
    toy.land()
    assert toy.hit(range(50)) == 48, "the replay boundary is still good"
    assert toy.hit(conversation(toy, "r")) == 48
    toy.run()
    toy.assert_all_free()


def test_a_rolling_checkpoint_costs_one_page_that_nobody_holds() -> None:
    toy = toy_of(full(), state())
    toy.add("r", list(range(40)), max_tokens=60)
    seen = set()

    def look(plan: StepPlan) -> None:
        row, coordinator = toy.cache.row(toy.requests["r"]), toy.cache.coordinator
        assert coordinator.num_held(row, 1) == 1 or int(plan.start[0]) == 0
        kept, mark = coordinator.rolling.kept[row], int(coordinator.rolling.kept_at[row])
        seen.add((mark, np.count_nonzero(kept != NO_PAGE)))

    toy.run(look=look)
    assert seen == {(0, 0), (48, 1), (64, 1), (80, 1), (96, 1)}


def test_decoding_asks_the_cache_once_per_unit() -> None:
    """Steps in which any table of the state changes: one in sixteen."""
    toy = toy_of(full(64), state())
    toy.add("r", list(range(64)), max_tokens=65)
    pages = []
    toy.run(look=lambda plan: pages.append(int(plan.groups[1].write_page[-1])))
    changes = np.flatnonzero(np.diff(pages)) + 1
    assert (np.diff(changes) == UNIT).all() and len(changes) == 4


def test_rolling_checkpoints_give_way_before_any_request_does() -> None:
    """Three states fit. Three requests decode at once, leave no checkpoint behind, and none is
    preempted.
    """
    toy = Toy(
        layout_of(
            ToyGroup(law=Snapshot(), block_tokens=1, entry_bytes=640),
            unit=4,
            slabs=4,
            max_model_len=64,
        ),
        seqs=4,
    )
    for index in range(3):
        toy.add(f"r{index}", list(range(10 * index, 10 * index + 5)), max_tokens=30)
    toy.run()
    assert toy.scheduler.num_preemptions == 0
    toy.assert_all_free()


@pytest.mark.parametrize("chunk", [7, 64, 256])
def test_a_chunk_holds_several_checkpoints_and_what_is_published_is_never_written_again(
    chunk: int,
) -> None:
    """Every state at a mark is written to a page of its own in the middle of the chunk; the last
    one lies in the table.
    """
    toy = Toy(layout_of(full(), state(), slabs=600, max_model_len=512), budget=chunk)
    marks, prompt = (32, 50, 101), list(range(150))
    stored: list[int] = []
    published: set[int] = set()

    def look(plan: StepPlan) -> None:
        pages = plan.groups[1].write_page
        assert not published & set(pages.tolist()), "a published page is written"
        stored.extend(written(plan, 1))
        ends = [
            stop - 1
            for mark in (32, 48, 100, 148)
            if plan.start[0] < (stop := mark) <= plan.stop[0]
        ]
        assert set(written(plan, 1)) == {
            *ends,
            int(plan.stop[0]) - 1,
        }, "states at checkpoints and at the end, no others"
        assert len(set(pages[pages != NO_PAGE].tolist())) == np.count_nonzero(pages != NO_PAGE), (
            "one page each"
        )
        index = toy.cache.coordinator.index.pages[toy.cache.coordinator.grains[1].lanes]
        published.update(index[index != NO_PAGE].tolist())

    toy.add("r", prompt, marks=marks, max_tokens=1)
    toy.run(look=look)
    assert {31, 47, 99, 147} <= set(stored)
    assert [toy.hit(prompt[:stop]) for stop in (40, 60, 120, 149)] == [32, 48, 100, 148]
    toy.assert_all_free()


def test_a_recycled_state_never_leaks_into_a_new_request() -> None:
    """Pages go round while prompts share nothing: the runner would find another request's state at
    the first read.
    """
    toy = Toy(layout_of(full(), state(), unit=4, slabs=24, max_model_len=64), seqs=3)
    for index in range(12):
        toy.add(f"r{index}", [index + 1] * (9 + index), max_tokens=20)
    toy.run(depth=2)
    toy.assert_all_free()


def siblings(toy: Toy, shared: int, marks: Sequence[int]) -> list[int]:
    hits = []
    for index in range(4):
        prompt = [*range(shared), *[900 + index] * 30]
        hits.append(
            toy.serve(f"s{index}", prompt, marks=tuple(marks), max_tokens=3).num_cached_tokens
        )
    return hits


@pytest.mark.parametrize("size", [64, 64 * 50])
@pytest.mark.parametrize("shared", [48, 200])
def test_the_second_sibling_hits_an_announced_junction_and_the_third_any_other(
    size: int, shared: int
) -> None:
    heavy = ToyGroup(law=Snapshot(), block_tokens=1, entry_bytes=size)
    whole = shared // UNIT * UNIT
    assert siblings(toy_of(full(), heavy), shared, ()) == [0, 0, whole, whole]
    assert siblings(toy_of(full(), heavy), shared, (shared,)) == [0, whole, whole, whole]
    assert siblings(toy_of(full(), heavy, checkpoint_interval=48), shared, ())[1:] == [
        shared // 48 * 48,
        whole,
        whole,
    ]


def test_next_start_finds_what_rolls_and_completes_say() -> None:
    for interval in (None, 8, 21):
        policy = CheckpointPolicy(unit=8, interval=interval)
        for n in range(1, 60):
            starts = np.arange(n, n + 200)
            for rolling in (False, True):
                found = np.flatnonzero(policy.completes(starts) | (policy.rolls(starts) & rolling))
                expected = n + int(found[0]) if len(found) else np.iinfo(np.int64).max
                assert policy.next_start(np.array([n]), np.array([rolling]))[0] == expected


def test_rings_that_reach_back_are_told_from_those_that_do_not() -> None:
    """Against the tables themselves: after any number of tokens, has a full ring all that its last
    whole unit needs?
    """
    for law, block in LAWS:
        group = layout_of(
            ToyGroup(law=law, block_tokens=block), unit=UNIT, max_model_len=4096
        ).groups[0]
        needs, lacking = law.needs, False
        for n in range(960, 1200):
            last = (n - 1) // block
            ring = set(range(last - group.turning + 1, last + 1)) | set(range(group.fixed or 0))
            if law.next_release(0) is not None:
                ring = {b for b in ring if (b + 1) * block > law.first(n - 1)}
            wanted = {
                token // block
                for start, stop in needs(n // UNIT * UNIT)
                for token in range(start, stop)
            }
            lacking |= not wanted <= ring
        assert group.reaches_back(UNIT) <= (not lacking), (law, block)
