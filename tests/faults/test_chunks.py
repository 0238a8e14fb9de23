"""States, windows and compressors across the borders of chunks and blocks.

Protects: however a prompt is cut into steps, what is stored at a position is what one step over
everything would have stored, and only places that really hold their state are offered as resume
points.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from octavo.base import blocks_of
from octavo.sched.step import StepPlan
from octavo.sim.model import ToyGroup
from octavo.spec.law import Everything, Tail
from octavo.spec.stream import Field, Stream
from tests.faults.toy import (
    ALL_LAWS,
    Toy,
    chunked,
    full,
    layout_of,
    sinks,
    state,
    tail,
    window,
    written,
)


def run_cuts(
    toy: Toy, name: str, tokens: list[int], cuts: list[int], *, max_tokens: int = 1
) -> None:
    """Compute a prompt in steps that end exactly at ``cuts``."""
    toy.add(name, tokens, max_tokens=max_tokens)
    for start, stop in pairwise([0, *cuts]):
        toy.scheduler.max_num_batched_tokens = stop - start
        plan = toy.step()
        assert (int(plan.start[0]), int(plan.stop[0])) == (start, stop)
    toy.scheduler.max_num_batched_tokens = 64
    toy.run()


@pytest.mark.parametrize("cuts", [[8, 22], [22], [6, 12, 18, 22], [1, 22], [21, 22], [10, 20, 22]])
def test_only_states_that_were_stored_at_their_place_are_offered(cuts: list[int]) -> None:
    """A state every 8 tokens at most: whatever steps a prompt of 22 ran in, each resume point that
    a probe reports lies in its page as the state after exactly that many tokens. A border that some
    step ran over is a place only where it was planned.
    """
    toy = Toy(layout_of(full(), state(), unit=2), checkpoint_interval=8)
    tokens = list(range(22))
    run_cuts(toy, "r", tokens, cuts)
    hits = toy.warm_hits(tokens)
    offered = sorted({hit for hit in hits if hit})
    assert offered == [8, 16, 20, 22], (
        "the interval, the replay boundary before the last token, and the end"
    )


@pytest.mark.parametrize("budget", [4, 7, 10])
def test_chunk_ends_off_the_grid_skip_no_checkpoint(budget: int) -> None:
    """Steps smaller than the interval, or that end beside it, still leave a state at each interval:
    chunk ends and checkpoints have nothing to do with each other.
    """
    toy = Toy(layout_of(full(), state()), budget=budget, checkpoint_interval=8)
    tokens = list(range(30))
    toy.serve("r", tokens, max_tokens=1)
    assert toy.warm_hits(tokens) == [0, 8, 8, 16, 16, 24, 28]


def test_a_checkpoint_is_offered_by_its_receipt_and_never_from_a_lost_step() -> None:
    """State 24 is being computed: until the receipt nobody resumes there, and if the step is lost
    nobody ever does.
    """
    for lost in (False, True):
        toy = Toy(layout_of(full(), state()), checkpoint_interval=8)
        tokens = list(range(25))
        toy.add("r", tokens, max_tokens=3)
        toy.launch(lost=lost)
        assert toy.hit(tokens[:24]) == 0, "nothing is offered before it is there"
        toy.land()
        assert toy.hit(tokens[:24]) == (0 if lost else 24)
        toy.run()
        assert toy.hit(tokens[:24]) == 24
        toy.warm_hits(tokens)
        toy.assert_all_free()


def test_each_request_of_a_mixed_batch_checkpoints_at_its_own_positions() -> None:
    """Prompts of 5, 7 and 9 tokens in one step, a state every 4 tokens: the second request's state
    after 4 tokens lies behind its own fourth token, not at a multiple of 4 of the flat batch.
    """
    toy = Toy(layout_of(state()), checkpoint_interval=4)
    prompts = {
        name: [base + i for i in range(length)]
        for name, base, length in (("a", 0, 5), ("b", 20, 7), ("c", 40, 9))
    }
    for name, prompt in prompts.items():
        toy.add(name, prompt, max_tokens=1)
    plan = toy.step()
    assert plan.request_ids == ("a", "b", "c") and plan.query_start.tolist() == [0, 5, 12, 21]
    assert [written(plan, 0, i) for i in range(3)] == [[3, 4], [3, 6], [3, 7, 8]]
    assert all(toy.hit(prompt[:4]) == 4 for prompt in prompts.values())
    toy.run()


def test_window_pages_are_found_again_by_content() -> None:
    """A's window lives on in the index, not in a ring of A's own: B resends the prompt, reads those
    pages and writes none of its last 8 tokens again, unless they are gone.
    """
    toy = Toy(layout_of(full(), window(8)))
    prompt = list(range(32))
    toy.serve("a", prompt, max_tokens=1)
    toy.add("b", prompt, max_tokens=1)
    plan = toy.step()
    assert int(plan.start[0]) == 28
    toy.run()
    toy.cache.clear_prefixes()
    toy.add("c", prompt, max_tokens=1)
    assert int(toy.step().start[0]) == 0
    toy.run()


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 15, 16, 40])
def test_a_chunk_wider_than_the_ring_overwrites_nothing_that_is_read(chunk: int) -> None:
    """Window 8, a ring of 3 blocks of 4, chunks up to the whole prompt: each query finds exactly
    its last 8 tokens (each read is checked), and the ring is never wider than the law asks.
    """
    toy = Toy(layout_of(full(), window(8)), budget=chunk, enable_prefix_caching=False)
    ring = toy.layout.groups[1].turning
    request = toy.add("r", list(range(40)), max_tokens=12)

    def look(plan: StepPlan) -> None:
        assert len(toy.pages_of("r", 1)) <= ring
        stored = written(plan, 1)
        needed = [
            p
            for start, stop in toy.layout.groups[1].group.law.needs(int(plan.stop[0]))
            for p in range(start, stop)
        ]
        assert set(stored) >= set(needed) & set(range(int(plan.start[0]), int(plan.stop[0])))

    toy.run(look=look)
    assert request.finished and toy.runner.entries_read > 0


@pytest.mark.parametrize("cuts", [[8], [5, 8], [1, 2, 3, 4, 5, 6, 7, 8], [3, 8], [7, 8]])
def test_several_tokens_behind_a_state_are_as_one_by_one(cuts: list[int]) -> None:
    """State after 5, then 3 tokens at once: the state after 8 is that of 8 single steps."""
    toy = Toy(layout_of(state()))
    tokens = list(range(8))
    toy.add("r", tokens, max_tokens=2)
    for start, stop in pairwise([0, *cuts]):
        toy.scheduler.max_num_batched_tokens = stop - start
        plan = toy.step()
        page = int(plan.groups[0].write_page[int(plan.query_start[1]) - 1])
        assert toy.record(0, page, 0) == toy.runner.truths["r"].records[stop - 1]
    toy.run()


def test_borders_crossed_in_the_middle_of_a_chunk_keep_their_states() -> None:
    """Chunks of 6, a state every 8 tokens: 8 and 16 are passed in mid-chunk."""
    toy = Toy(layout_of(full(8), state(), unit=8), budget=6, checkpoint_interval=8)
    tokens = list(range(18))
    toy.serve("r", tokens, max_tokens=1)
    assert toy.warm_hits(tokens) == [8, 16]


@pytest.mark.parametrize("n", [0, 3, 4, 5, 7, 8, 9, 127, 128, 129])
def test_compressed_entries_are_whole_and_in_the_past(n: int) -> None:
    """Ratio 4: after n tokens there are n // 4 entries, entry j from token 4j + 3 on; the tail
    holds what the next entry will be made of, overlap included, from the very first tokens on.
    """
    stream = Stream(
        name="c", law=Everything(), fields=(Field(name="c", shape=(2,), dtype="uint8"),), stride=4
    )
    entries = sum(stop - start for start, stop in stream.needs(n)) // 4
    assert entries == n // 4 and stream.bytes_needed(n) == 2 * entries
    assert all(n >= 4 * j + 4 for j in range(entries))
    resident = {p for start, stop in Tail(4, 4).needs(n) for p in range(start, stop)}
    closing = n // 4 * 4
    assert resident == set(range(max(0, closing - 4), n))


@pytest.mark.parametrize(
    "groups", [(full(4), tail(4, 4), window(6)), (full(8), tail(4, 0), tail(8, 8)), ALL_LAWS]
)
@pytest.mark.parametrize("border", [4, 8, 64])
def test_prefill_equals_prefill_and_decode_around_borders(
    groups: tuple[ToyGroup, ...], border: int
) -> None:
    """Prompts of k tokens and decoding behind them, k around the borders of entries and blocks:
    every entry that a step reads is the one a single prefill would have written.
    """
    for length in range(border - 1, border + 2):
        for budget in (64, 5) if border < 64 else (31,):
            toy = Toy(layout_of(*groups), budget=budget, enable_prefix_caching=budget != 5)
            toy.serve("r", [i % 5 for i in range(length)], max_tokens=6)
            tokens = [*toy.requests["r"].prompt_token_ids, *toy.requests["r"].output_token_ids]
            toy.serve("all at once", tokens[:-1], max_tokens=1)
            assert toy.requests["all at once"].output_token_ids == tokens[-1:]
            toy.assert_all_free()


@pytest.mark.parametrize("budget", [1, 5, 6, 17])
@pytest.mark.parametrize(("chunk", "block"), [(6, 4), (5, 2), (4, 8)])
def test_blocks_across_two_chunks_go_only_when_wholly_past(
    budget: int, chunk: int, block: int
) -> None:
    """Chunks of local attention that blocks do not divide: a block with rows of the old and the new
    chunk stays, those that lie wholly in the past go as soon as the ring wants their pages.
    """
    toy = Toy(
        layout_of(full(), chunked(chunk, block), unit=2), budget=budget, enable_prefix_caching=False
    )
    toy.add("r", list(range(26)), max_tokens=14)
    law, straddled = toy.layout.groups[1].group.law, 0

    while toy.scheduler.has_work:
        plan = toy.launch()
        assert plan is not None
        stop = int(plan.stop[0])
        held, needed = set(toy.pages_of("r", 1)), set(blocks_of(law.needs(stop), block))
        assert held >= needed
        assert len(held) <= toy.layout.groups[1].turning, "dead chunks do not pile up"
        straddled += any(b * block < law.first(stop) < (b + 1) * block for b in needed)
        toy.land()
    assert straddled or chunk % block == 0


@pytest.mark.parametrize("budget", [1, 3, 9, 64])
def test_every_law_at_once_in_any_chunks(budget: int) -> None:
    """Three requests of mixed lengths, prefill and decode in one batch, all laws with sinks wider
    than a block.
    """
    toy = Toy(layout_of(*ALL_LAWS, sinks(6, 5)), budget=budget)
    for i, length in enumerate((1, 13, 34)):
        toy.add(f"r{i}", [i + j % 4 for j in range(length)], max_tokens=8)
    toy.run(depth=2)
    toy.assert_all_free()


def test_several_answers_share_a_checkpoint_and_keep_states_of_their_own() -> None:
    """Three continuations of one prompt of 10 with a state after 8: one shared checkpoint, three
    private states. Two end early; the third never notices.
    """
    toy = Toy(layout_of(full(), state(), unit=8 // 2), seqs=3)
    prompt = list(range(10))
    toy.serve("parent", prompt, max_tokens=1)
    for i in range(3):
        toy.add(f"n{i}", prompt, max_tokens=10, seed=i)
    plan = toy.step()
    assert plan.start.tolist() == [8, 8, 8]
    private = [set(toy.pages_of(f"n{i}", 1).values()) for i in range(3)]
    assert len(set().union(*private)) == 3
    read = {int(page) for page in plan.groups[1].table[plan.groups[1].rows].reshape(-1)}
    assert len(read) == 1, "one checkpoint, read by all"
    toy.abort("n0")
    toy.abort("n2")
    toy.poison_free()
    toy.run()
    assert len(toy.requests["n1"].output_token_ids) == 10
    assert toy.hit(prompt[:8]) == 8
    toy.assert_all_free()


def test_a_checkpoint_at_the_end_of_a_chunk_of_one_token_is_offered_by_its_receipt() -> None:
    """A prompt whose last chunk is the one token that completes a marked unit: others hit it while
    the request decodes.
    """
    toy = Toy(layout_of(full(), window(6)), budget=5)
    prompt = list(range(16))
    toy.add("a", prompt, max_tokens=30, marks=(16,))
    for _ in range(3):
        toy.step()
        assert toy.hit(prompt) <= 12
    toy.step()
    assert toy.requests["a"].output_token_ids
    assert toy.hit(prompt) == 16
    toy.run()
    toy.assert_all_free()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 23, 24, 25])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_nothing_of_an_old_chunk_is_held_behind_its_border(length: int, budget: int) -> None:
    """Chunked local attention: whatever the prompt and its cutting, a request holds blocks of the
    open chunk only.
    """
    toy = Toy(layout_of(full(), chunked(8)), budget=budget, enable_prefix_caching=False)
    request = toy.add("a", list(range(length)), max_tokens=12)
    while toy.scheduler.has_work:
        toy.step()
        if not request.finished:
            computed = toy.cache.computed(request)
            # At a border the whole chunk before it is dead, and may lie there until the next token
            # is computed.
            open_chunk = (computed - 1) // 8 * 8
            assert all(block * 4 >= open_chunk for block in toy.pages_of("a", 1)), computed
    toy.assert_all_free()
