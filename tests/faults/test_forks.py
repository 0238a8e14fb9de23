"""Several continuations of one prompt: they share what they have in common and nothing else.

Protects: no continuation sees another's entries; what all read exists once; each can end, be
preempted or be refused a place without the others noticing.
"""

from __future__ import annotations

import pytest

from octavo.sim.model import ToyGroup
from tests.faults.toy import ALL_LAWS, Toy, full, layout_of, state, window

LAWS = [(full(), group) for group in ALL_LAWS[1:]] + [(full(),), (full(8), window(6), state())]
PROMPT = list(range(10))


def outputs(toy: Toy, name: str, n: int) -> list[list[int]]:
    """Output tokens by branch."""
    return [
        toy.requests[f"{name}#{branch}" if branch else name].output_token_ids for branch in range(n)
    ]


@pytest.mark.parametrize("groups", LAWS)
@pytest.mark.parametrize("length", [1, 4, 7, 8, 10, 13])
def test_continuations_differ_and_none_disturbs_another(
    groups: tuple[ToyGroup, ...], length: int
) -> None:
    """Every read is checked by the runner; a prompt ends before, on and behind borders of blocks
    and units.
    """
    toy = Toy(layout_of(*groups), seqs=4, budget=5)
    toy.add("a", list(range(length)), n=3, max_tokens=20)
    toy.run()
    assert [len(output) for output in outputs(toy, "a", 3)] == [20] * 3
    assert len({tuple(output) for output in outputs(toy, "a", 3)}) == 3
    toy.assert_all_free()


def test_the_prompt_is_stored_once_and_only_the_last_block_is_copied() -> None:
    """Ten tokens in blocks of four, three continuations: two full blocks are one page each, the
    third is copied twice.
    """
    toy = Toy(layout_of(full()), seqs=4)
    toy.add("a", PROMPT, n=3, max_tokens=2)
    toy.step()
    assert toy.held() == [3], "forking takes no page"
    plan = toy.launch()
    assert (
        plan is not None and len(plan.copies) == 2 and len({job.source for job in plan.copies}) == 1
    )
    pages = [toy.pages_of(name, 0) for name in ("a", "a#1", "a#2")]
    assert all(page[0] == pages[0][0] and page[1] == pages[0][1] for page in pages)
    assert len({page[2] for page in pages}) == 3
    toy.land()
    toy.assert_all_free()


def test_states_are_private_and_the_checkpoint_is_shared() -> None:
    """A recurrent state after ten tokens, hash unit eight: one checkpoint, three states; two leave,
    the third is intact.
    """
    toy = Toy(layout_of(full(8), state(), unit=8), seqs=4)
    toy.add("a", PROMPT, n=3, max_tokens=30)
    for _ in range(4):
        toy.step()
    states = [set(toy.pages_of(name, 1).values()) for name in ("a", "a#1", "a#2")]
    assert not (states[0] & states[1] or states[0] & states[2] or states[1] & states[2])
    assert toy.hit(PROMPT[:8]) == 8
    toy.abort("a")
    toy.abort("a#2")
    toy.run()
    assert len(toy.requests["a#1"].output_token_ids) == 30
    toy.assert_all_free()


@pytest.mark.parametrize("groups", LAWS)
def test_any_order_of_leaving_gives_every_page_back_once(groups: tuple[ToyGroup, ...]) -> None:
    """Continuations end by abort at different tokens, the source first, in the middle and last."""
    for order in (("a", "a#1", "a#2"), ("a#2", "a", "a#1"), ("a#1", "a#2", "a")):
        toy = Toy(layout_of(*groups), seqs=4)
        toy.add("a", PROMPT, n=3, max_tokens=40)
        toy.step()
        for name in order:
            toy.step()
            toy.step()
            toy.abort(name)
        toy.assert_all_free()


def test_a_continuation_without_a_row_waits_and_loses_nothing() -> None:
    """Two rows, five continuations: three wait with their first token known and are computed like
    any other request.
    """
    toy = Toy(layout_of(full(), window(6)), seqs=2)
    toy.add("a", PROMPT, n=5, max_tokens=6)
    toy.step()
    assert (toy.scheduler.num_running, toy.scheduler.num_waiting) == (2, 3)
    toy.run()
    assert [len(output) for output in outputs(toy, "a", 5)] == [6] * 5
    toy.assert_all_free()


def test_memory_for_one_serves_all_continuations_one_after_another() -> None:
    """An arena that holds one long continuation at a time: the others are preempted, and all
    end.
    """
    toy = Toy(layout_of(full(), window(6), slabs=12), seqs=4)
    toy.add("a", PROMPT, n=4, max_tokens=12)
    toy.run()
    assert toy.scheduler.num_preemptions > 0
    assert [len(output) for output in outputs(toy, "a", 4)] == [12] * 4
    toy.assert_all_free()


def test_a_lost_step_forks_nothing_and_the_prompt_is_computed_again() -> None:
    """The step that was to sample all first tokens fails: no continuation exists before it is
    repeated.
    """
    toy = Toy(layout_of(full(), window(6)), seqs=4)
    toy.add("a", PROMPT, n=3, max_tokens=5)
    toy.launch(lost=True)
    assert toy.land() == [] and set(toy.requests) == {"a"}
    toy.run()
    assert [len(output) for output in outputs(toy, "a", 3)] == [5] * 3
    toy.assert_all_free()


def test_a_source_aborted_while_its_prompt_is_in_flight_forks_nothing() -> None:
    """The receipt of an aborted request's last chunk brings no continuation to life."""
    toy = Toy(layout_of(full(), window(6)), seqs=4)
    toy.add("a", PROMPT, n=3, max_tokens=5)
    toy.launch()
    toy.abort("a")
    assert toy.land() == []
    toy.assert_all_free()


def test_continuations_publish_what_they_make_and_each_can_be_resumed() -> None:
    """The next turn of any continuation hits its whole units."""
    toy = Toy(layout_of(full(), window(6)), seqs=4)
    toy.add("a", PROMPT, n=3, max_tokens=15)
    toy.run()
    for output in outputs(toy, "a", 3):
        assert toy.hit([*PROMPT, *output[:-1]]) == 24
    assert toy.hit(PROMPT) == 8


def test_moved_pages_of_forks_are_found_again() -> None:
    """Compaction moves pages that several continuations share; all tables follow."""
    toy = Toy(
        layout_of(full(entry_bytes=96), window(6, entry_bytes=32), slab_pages=2, slabs=6), seqs=6
    )
    toy.add("a", PROMPT, n=4, max_tokens=24)
    for index in range(12):
        toy.add(f"other {index}", [50 + index] * (5 + index % 4 * 6), max_tokens=1 + index % 3)
    toy.run(depth=2)
    assert toy.cache.coordinator.compactions > 0
    assert [len(output) for output in outputs(toy, "a", 4)] == [24] * 4
    toy.assert_all_free()
