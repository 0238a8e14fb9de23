"""Preempted, retracted, failed and resumed requests.

Protects: a request that lost its pages goes on exactly as if it never had, whoever used them
    meanwhile.
"""

from __future__ import annotations

import pytest

from octavo.sim.model import ToyGroup
from tests.faults.toy import ALL_LAWS, Toy, full, layout_of, state, window

MIXTURES = [(full(),), (full(), window(6)), (full(), state()), ALL_LAWS]


@pytest.mark.parametrize("groups", MIXTURES)
@pytest.mark.parametrize("caching", [False, True])
def test_somebody_else_in_the_slot_does_not_show(
    groups: tuple[ToyGroup, ...], caching: bool
) -> None:
    """A decodes, is retracted, B takes its row and its pages, A resumes: every declared component
    of A is A's own again.
    """
    toy = Toy(layout_of(*groups, slabs=60), seqs=1, enable_prefix_caching=caching)
    toy.add("a", list(range(12)), max_tokens=20)
    for _ in range(8):
        toy.step()
    row = toy.cache.row(toy.requests["a"])
    toy.retract("a")
    b = toy.add("b", [70 + i for i in range(30)], max_tokens=8, priority=1)
    toy.step()
    assert toy.cache.row(b) == row, "B sits where A sat"
    toy.run()
    assert toy.requests["a"].num_preemptions == 1 and len(toy.requests["a"].output_token_ids) == 20
    toy.assert_all_free()


@pytest.mark.parametrize("groups", MIXTURES)
@pytest.mark.parametrize(("cold", "publish"), [(False, True), (True, False)])
def test_preemption_at_any_step_changes_no_output(
    groups: tuple[ToyGroup, ...], cold: bool, publish: bool
) -> None:
    """Preempted after step k of a chunked prompt and 12 decoded tokens, for every k: all 12 tokens
    come, and the right ones.
    """
    for after in range(1, 15, 1 if publish else 4):
        toy = Toy(layout_of(*groups), budget=5)
        toy.add("other", [9, 8, 7], max_tokens=16)
        toy.add("r", list(range(11)), max_tokens=12)
        for _ in range(after):
            toy.step()
        if toy.requests["r"].finished:
            break
        toy.retract("r", cold=cold, publish=publish)
        toy.poison_free()
        toy.run()
        assert (
            toy.requests["r"].num_preemptions == 1 and len(toy.requests["r"].output_token_ids) == 12
        )
        toy.assert_all_free()


@pytest.mark.parametrize("groups", MIXTURES)
def test_preemption_while_its_step_is_in_flight_voids_that_receipt(
    groups: tuple[ToyGroup, ...],
) -> None:
    """The receipt of a step from before the preemption arrives after it: its token is not appended
    twice, nor its pages kept.
    """
    for after in range(5):
        toy = Toy(layout_of(*groups), budget=6)
        toy.add("r", list(range(11)), max_tokens=6)
        for _ in range(after):
            toy.step()
        toy.launch()
        toy.retract("r")
        toy.run(depth=2)
        assert len(toy.requests["r"].output_token_ids) == 6
        toy.assert_all_free()


@pytest.mark.parametrize("slabs", (14, 19, 24))
@pytest.mark.parametrize("depth", [1, 2])
def test_memory_that_runs_out_preempts_and_everybody_finishes(slabs: int, depth: int) -> None:
    """Four requests whose growth does not fit together: the last ones give way, as often as it
    takes, and none is starved.
    """
    toy = Toy(layout_of(full(), window(6), slabs=slabs), budget=16)
    for i in range(4):
        toy.add(f"r{i}", [i] * 8, max_tokens=24)
    toy.run(depth=depth)
    assert toy.scheduler.num_preemptions > 0
    assert all(len(request.output_token_ids) == 24 for request in toy.requests.values())
    toy.assert_all_free()


@pytest.mark.parametrize("groups", MIXTURES)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_lost_step_is_computed_again(groups: tuple[ToyGroup, ...], depth: int) -> None:
    """Step k is lost with all it wrote, copies included: requests start again from what was
    published before, and end right.
    """
    for when in (0, 1, 2, 4):
        toy = Toy(layout_of(*groups, slabs=60), budget=7)
        toy.serve("earlier", list(range(10)), max_tokens=1)
        toy.add("r", list(range(14)), max_tokens=5)
        toy.add("s", [*range(10), 50, 51], max_tokens=5)
        for _ in range(when):
            toy.step()
        for _ in range(depth):
            toy.launch(lost=True)
        while toy.flights:
            toy.land()
        toy.run()
        toy.assert_all_free()


def test_a_preempted_request_keeps_what_it_published() -> None:
    """Recompute is from its own cached prefix, not from the start, where nothing was evicted
    meanwhile.
    """
    toy = Toy(layout_of(full(), window(8)))
    toy.add("r", list(range(20)), max_tokens=12)
    for _ in range(6):
        toy.step()
    known = toy.requests["r"].num_tokens
    toy.retract("r")
    plan = toy.step()
    assert int(plan.start[0]) >= known - 2 * toy.layout.hash_unit
    toy.run()
