"""The fake runner finds what it is there to find: each kind of wrong read or write, from hand-made
plans.

Owns plans written by hand for one request or two. Knows plans and toy layouts; needs neither
scheduler nor cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from octavo.cache.layout import CacheLayout
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import CopyJob, GroupStep, StepPlan
from octavo.sim.clients import Anything
from octavo.sim.fake import FakeRunner, Place, Truth, Violation
from octavo.sim.model import ToyGroup, toy_layout
from octavo.spec.law import Everything, Law, Snapshot, Window

PROMPT = (0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1)


def layout_of(*laws: Law, block_tokens: int = 4) -> CacheLayout:
    toys = [
        ToyGroup(law=law, block_tokens=block_tokens, entry_bytes=64 * (i + 1))
        for i, law in enumerate(laws)
    ]
    return toy_layout(toys, hash_unit=2, slab_pages=1, num_slabs=8, max_model_len=48)


def runner_of(layout: CacheLayout, *names: str) -> FakeRunner:
    runner = FakeRunner(layout)
    for name in names:
        runner.register(name, PROMPT, SamplingParams())
    return runner


def group_step(
    runner: FakeRunner,
    spans: list[tuple[int, int]],
    tables: list[list[int]],
    writes: list[int],
    *,
    group: int,
    fresh: bool,
) -> GroupStep:
    """One group's step; ``writes`` are the pages of all tokens, their rows follow from their
    positions.
    """
    layout = runner.layout.groups[group]
    rows = [
        position % layout.block_tokens for start, stop in spans for position in range(start, stop)
    ]
    return GroupStep(
        table=np.array(tables, np.int32),
        rows=np.arange(len(spans), dtype=np.int32),
        fixed=layout.fixed,
        turning=layout.turning,
        block_tokens=layout.block_tokens,
        fresh=np.full(len(spans), fresh),
        write_page=np.array(writes, np.int32),
        write_row=np.array(rows, np.int32),
    )


def plan_of(
    runner: FakeRunner,
    spans: dict[str, tuple[int, int]],
    tables: list[list[int]],
    writes: list[int],
    *,
    step: int = 0,
    fresh: bool = False,
    copies: tuple[CopyJob, ...] = (),
    params: SamplingParams | None = None,
    **more: Any,
) -> StepPlan:
    """A plan for a layout of one group."""
    spread = list(spans.values())
    lengths = [stop - start for start, stop in spread]
    tokens = [PROMPT[position] for start, stop in spread for position in range(start, stop)]
    return StepPlan(
        step=step,
        request_ids=tuple(spans),
        token_ids=np.array(tokens, np.int32),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        start=np.array([start for start, _ in spread], np.int32),
        stop=np.array([stop for _, stop in spread], np.int32),
        samples=np.array([stop == len(PROMPT) for _, stop in spread]),
        sampling=tuple(params or SamplingParams() for _ in spread),
        output_len=np.zeros(len(spread), np.int32),
        branch=more.pop("branch", np.zeros(len(spread), np.int32)),
        groups=(group_step(runner, spread, tables, writes, group=0, fresh=fresh),),
        copies=copies,
        **more,
    )


def full_runner(*names: str) -> FakeRunner:
    return runner_of(layout_of(Everything()), *names)


def test_a_right_plan_passes_and_samples_the_truth() -> None:
    runner = full_runner("a")
    assert runner.execute(plan_of(runner, {"a": (0, 6)}, [[0, 4]], [0] * 4 + [4] * 2)).tokens == {}
    result = runner.execute(plan_of(runner, {"a": (6, 12)}, [[0, 4, 8]], [4] * 2 + [8] * 4, step=1))
    assert result.tokens == {"a": runner.truths["a"].token(12)}
    assert runner.entries_written == 12


def test_truth_needs_no_steps_and_depends_on_seed_and_salt() -> None:
    def tokens(seed: int | None, salt: str) -> list[int]:
        truth = Truth(prompt=PROMPT, params=SamplingParams(seed=seed), salt=salt, vocab_size=5)
        return truth.output(20)

    assert tokens(1, "") == tokens(1, "")
    assert tokens(1, "") != tokens(2, "")
    assert tokens(1, "") != tokens(1, "tenant")


def test_a_missing_entry_is_found() -> None:
    runner = full_runner("a")
    runner.execute(plan_of(runner, {"a": (0, 4)}, [[0]], [0, 0, 0, 0]))
    with pytest.raises(Violation, match="reads tokens"):
        runner.execute(plan_of(runner, {"a": (4, 5)}, [[4, 8]], [8], step=1))


def test_an_unstored_own_token_is_found_where_writing_comes_first() -> None:
    runner = full_runner("a")
    with pytest.raises(Violation, match="reads tokens"):
        runner.execute(plan_of(runner, {"a": (0, 2)}, [[0]], [0, -1]))


def test_another_requests_entry_is_found() -> None:
    runner = full_runner("a")
    runner.register("b", (1, *PROMPT[1:]), SamplingParams())
    runner.execute(plan_of(runner, {"a": (0, 4)}, [[0]], [0] * 4))
    with pytest.raises(Violation, match="reads tokens"):
        runner.execute(plan_of(runner, {"b": (4, 5)}, [[0, 4]], [4], step=1))


def test_an_equal_prefix_may_be_shared() -> None:
    runner = full_runner("a", "b")
    runner.execute(plan_of(runner, {"a": (0, 4)}, [[0]], [0] * 4))
    runner.execute(plan_of(runner, {"b": (4, 5)}, [[0, 4]], [4], step=1))


def test_a_write_of_another_page_size_breaks_what_it_covers() -> None:
    runner = runner_of(layout_of(Everything(), Window(4)), "a")
    runner.arena.claim(0, 0).rows[0] = runner.truths["a"].records[0]
    assert runner.arena.page(0) is not None
    runner.arena.claim(0, 1)
    page = runner.arena.page(0)
    assert page is not None and page.group == 1 and page.rows == [None] * 4


def test_a_page_across_two_slabs_is_refused() -> None:
    runner = full_runner("a")
    with pytest.raises(Violation, match="across two slabs"):
        runner.arena.claim(2, 0)
    with pytest.raises(Violation, match="outside the arena"):
        runner.arena.claim(runner.layout.arena.scratch_unit, 0)


def test_fresh_rows_turn_a_page_that_write_first_rows_may_not() -> None:
    def spans_over_one_page(fresh: bool) -> None:
        runner = runner_of(layout_of(Window(3), block_tokens=2), "a")
        runner.execute(plan_of(runner, {"a": (0, 4)}, [[0, 2]], [0, 0, 2, 2]))
        runner.execute(
            plan_of(runner, {"a": (4, 8)}, [[0, 2]], [-1, -1, 2, 2], step=1, fresh=fresh)
        )

    spans_over_one_page(True)
    with pytest.raises(Violation, match="reads tokens"):
        spans_over_one_page(False)


def test_states_read_before_they_are_written() -> None:
    runner = runner_of(layout_of(Snapshot(), block_tokens=1), "a")
    runner.execute(plan_of(runner, {"a": (0, 3)}, [[0]], [-1, -1, 0], fresh=True))
    runner.execute(plan_of(runner, {"a": (3, 4)}, [[0]], [0], step=1, fresh=True))
    with pytest.raises(Violation, match="must read before"):
        runner.execute(plan_of(runner, {"a": (4, 5)}, [[0]], [0], step=2, fresh=False))


def test_a_state_of_another_length_is_found() -> None:
    runner = runner_of(layout_of(Snapshot(), block_tokens=1), "a")
    runner.execute(plan_of(runner, {"a": (0, 3)}, [[0]], [-1, -1, 0], fresh=True))
    with pytest.raises(Violation, match="reads tokens"):
        runner.execute(plan_of(runner, {"a": (2, 3)}, [[0]], [0], step=1, fresh=True))


def test_two_writers_of_one_page_are_found() -> None:
    runner = full_runner("a", "b")
    with pytest.raises(Violation, match="in the same step"):
        runner.execute(plan_of(runner, {"a": (0, 2), "b": (0, 2)}, [[0], [0]], [0] * 4))


@dataclass(frozen=True)
class FixedWatch:
    """Says that two rows of the page at unit 0 are shared, and that everybody holds ``pages``."""

    pages: frozenset[int]

    def shared_rows(self) -> dict[Place, int]:
        return {(0, 0): 2}

    def held(self, request_id: str, group: int) -> frozenset[int]:
        return self.pages


def test_a_write_into_indexed_rows_or_a_page_not_held_is_found() -> None:
    runner = FakeRunner(layout_of(Everything()), watch=FixedWatch(frozenset({0, 4})))
    runner.register("a", PROMPT, SamplingParams())
    runner.execute(plan_of(runner, {"a": (0, 1)}, [[4]], [4]))
    with pytest.raises(Violation, match="offers to others"):
        runner.execute(plan_of(runner, {"a": (0, 1)}, [[0]], [0]))
    with pytest.raises(Violation, match="does not hold"):
        runner.execute(plan_of(runner, {"a": (0, 1)}, [[8]], [8]))


def test_a_page_handed_over_before_the_receipt_is_found() -> None:
    def hand_over(settled: bool) -> None:
        runner = full_runner("a", "b")
        runner.execute(plan_of(runner, {"a": (0, 4)}, [[0]], [0] * 4))
        if settled:
            runner.settle(0)
        runner.execute(plan_of(runner, {"b": (0, 2)}, [[0]], [0, 0], step=1))

    hand_over(True)
    with pytest.raises(Violation, match="not yet received"):
        hand_over(False)


def test_the_owner_may_fill_a_page_whose_first_rows_are_shared() -> None:
    runner = full_runner("a", "b")
    runner.execute(plan_of(runner, {"a": (0, 2)}, [[0, -1]], [0, 0]))
    runner.settle(0)
    spans = {"a": (2, 4), "b": (2, 3)}
    copied = plan_of(
        runner,
        spans,
        [[0, -1], [4, -1]],
        [0, 0, 4],
        step=1,
        copies=(CopyJob(source=0, target=4, units=4),),
    )
    runner.execute(copied)


def test_copies_carry_records_and_may_not_overlap() -> None:
    runner = full_runner("a")
    runner.execute(plan_of(runner, {"a": (0, 4)}, [[0]], [0] * 4))
    job = CopyJob(source=0, target=8, units=4)
    runner.execute(plan_of(runner, {"a": (4, 5)}, [[8, 4]], [4], step=1, copies=(job,)))
    with pytest.raises(Violation, match="overlaps itself"):
        runner.arena.copy(CopyJob(source=0, target=2, units=4))


def test_a_lost_step_leaves_garbage() -> None:
    runner = full_runner("a")
    result = runner.lose(plan_of(runner, {"a": (0, 4)}, [[0]], [0] * 4))
    assert result.failed and not result.tokens
    with pytest.raises(Violation, match="reads tokens"):
        runner.execute(plan_of(runner, {"a": (4, 5)}, [[0, 4]], [4], step=1))


def test_wrong_rows_tokens_and_samples_are_found() -> None:
    runner = full_runner("a")
    plan = plan_of(runner, {"a": (0, 2)}, [[0]], [0, 0])
    plan.groups[0].write_row[1] = 3
    with pytest.raises(Violation, match="should be row 1"):
        runner.execute(plan)
    plan = plan_of(runner, {"a": (0, 2)}, [[0]], [0, 0])
    plan.token_ids[1] = 0
    with pytest.raises(Violation, match="should be"):
        runner.execute(plan)
    plan = plan_of(runner, {"a": (0, 2)}, [[0]], [0, 0])
    plan.samples[0] = True
    with pytest.raises(Violation, match="samples is True"):
        runner.execute(plan)


def test_a_forgotten_request_may_not_be_computed() -> None:
    runner = full_runner("a")
    plan = plan_of(runner, {"a": (0, 2)}, [[0]], [0, 0])
    runner.forget("a")
    with pytest.raises(Violation, match="over or was never added"):
        runner.execute(plan)


# -- sampling --------------------------------------------------------------------------------------

PAGES = [0] * 4 + [4] * 4 + [8] * 4
TABLE = [[0, 4, 8]]


def whole(runner: FakeRunner, params: SamplingParams, **more: Any) -> StepPlan:
    """A plan that computes the prompt of ``a`` at once and samples."""
    return plan_of(runner, {"a": (0, len(PROMPT))}, TABLE, PAGES, params=params, **more)


def wide_runner(params: SamplingParams, vocab_size: int = 1000) -> FakeRunner:
    runner = FakeRunner(layout_of(Everything()), vocab_size=vocab_size)
    runner.register("a", PROMPT, params)
    return runner


def test_every_branch_has_a_token_of_its_own_and_the_records_of_its_tokens() -> None:
    runner = wide_runner(SamplingParams(n=3))
    result = runner.execute(whole(runner, SamplingParams(n=3), forks={0: ("a#1", "a#2")}))
    assert list(result.tokens) == ["a", "a#1", "a#2"] and len(set(result.tokens.values())) == 3
    for branch, name in enumerate(("a#1", "a#2"), 1):
        truth = runner.register(name, PROMPT, SamplingParams(n=3), branch=branch)
        assert truth.token(len(PROMPT)) == result.tokens[name]
        assert truth.records[: len(PROMPT)] == runner.truths["a"].records[: len(PROMPT)]
    copied = Truth(
        prompt=(*PROMPT, result.tokens["a#1"]), params=SamplingParams(), salt="", vocab_size=1000
    )
    assert copied.records == runner.truths["a#1"].records[: len(PROMPT) + 1], (
        "content is a function of tokens only"
    )


def test_a_fork_goes_on_from_its_parents_pages() -> None:
    params = SamplingParams(n=2)
    runner = full_runner("a")
    token = runner.execute(whole(runner, params, forks={0: ("a#1",)})).tokens["a#1"]
    runner.register("a#1", PROMPT, params, branch=1)
    runner.settle(0)
    plan = plan_of(runner, {"a#1": (11, 12)}, TABLE, [8], step=1, branch=np.array([1], np.int32))
    assert runner.execute(plan).tokens == {"a#1": token}


def test_wrong_branches_and_forks_are_found() -> None:
    runner = full_runner("a")
    with pytest.raises(Violation, match="is branch 0, the plan says 1"):
        runner.execute(whole(runner, SamplingParams(), branch=np.array([1], np.int32)))
    with pytest.raises(Violation, match="forks at token 6"):
        runner.execute(plan_of(runner, {"a": (0, 6)}, TABLE, PAGES[:6], forks={0: ("a#1",)}))


def test_logprobs_come_where_they_are_asked_for() -> None:
    params = SamplingParams(logprobs=2, n=2, prompt_logprobs=0)
    runner = wide_runner(params)
    scored = np.array(PROMPT[1:], np.int32)
    result = runner.execute(whole(runner, params, forks={0: ("a#1",)}, scored={0: scored}))
    assert {name: one.token_id for name, one in result.logprobs.items()} == result.tokens
    assert [one.token_id for one in result.scored["a"]] == list(PROMPT[1:])
    assert result.logprobs["a"].logprob != result.logprobs["a#1"].logprob
    with pytest.raises(Violation, match="to be scored"):
        runner.execute(whole(runner, params, scored={0: np.array(PROMPT, np.int32)}))
    plain = wide_runner(SamplingParams())
    with pytest.raises(Violation, match="to be scored"):
        plain.execute(whole(plain, SamplingParams(), scored={0: scored}))


def test_wrong_histories_are_found() -> None:
    params = SamplingParams(presence_penalty=1.0)
    runner = wide_runner(params)
    prompt, empty = np.array(PROMPT, np.int32), np.zeros(0, np.int32)
    runner.execute(whole(runner, params, history={0: (prompt, empty)}))
    with pytest.raises(Violation, match="history of penalties is missing"):
        runner.execute(whole(runner, params))
    with pytest.raises(Violation, match="history at token 12 is"):
        runner.execute(whole(runner, params, history={0: (prompt[:-1], prompt[-1:])}))


def test_wrong_constraints_are_found() -> None:
    params, mine, other = SamplingParams(), Anything(), Anything()
    runner, empty = wide_runner(params), np.zeros(0, np.int32)
    runner.register("a", PROMPT, params, constraint=mine)
    with pytest.raises(Violation, match="constraint is missing, or not its own"):
        runner.execute(whole(runner, params))
    with pytest.raises(Violation, match="constraint is missing, or not its own"):
        runner.execute(whole(runner, params, constrained={0: (other, empty)}))
    with pytest.raises(Violation, match="the constraint sees"):
        runner.execute(whole(runner, params, constrained={0: (mine, np.array([1], np.int32))}))
    runner.execute(whole(runner, params, constrained={0: (mine, empty)}))
    plain = wide_runner(params)
    with pytest.raises(Violation, match="constraint is missing, or not its own"):
        plain.execute(whole(plain, params, constrained={0: (mine, empty)}))
