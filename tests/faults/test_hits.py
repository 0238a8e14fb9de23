"""Groups that disagree on how much they have, exact hits, tiny rests, and saying why a hit was what
it was.

Protects: the hit of the model is the largest resume point of *every* group, in hash units, whatever
    the block sizes.
"""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from octavo.base import ConfigError
from octavo.cache.layout import CPU, solve_layout
from octavo.sim.model import ToyGroup
from octavo.spec.group import Group, Member
from octavo.spec.law import Everything, Law, Window
from octavo.spec.stream import Field, Stream
from tests.faults.toy import ALL_LAWS, Toy, chunked, full, layout_of, state, tail, window, written


def stream_group(law: Law, *, stride: int = 1, size: int = 64) -> Group:
    stream = Stream(
        name="x", law=law, fields=(Field(name="x", shape=(size,), dtype="uint8"),), stride=stride
    )
    return Group(law=law, members=(Member(layer=0, mixer="x", stream=stream),))


def test_a_sparse_group_is_asked_again_at_the_agreed_length() -> None:
    """A state lives at few places. Cutting its list to what full attention has would leave no state
    at all: the joint hit is the last place both have, here the mark at 4, though full attention
    alone has 12 and the state's last checkpoint is at 16.
    """
    toy = Toy(layout_of(full(), state()))
    prompt = list(range(20))
    toy.serve("first", prompt, marks=(4,))
    found = toy.probe([*prompt[:12], 90, 91])
    assert (found.matched, found.hit) == (12, 4)
    assert found.match.reach == (3, 1), "reaches are in units, per group"
    assert toy.serve("second", [*prompt[:12], 90, 91]).num_cached_tokens == 4


@pytest.mark.parametrize("seed", range(6))
def test_no_group_expands_the_candidate(seed: int) -> None:
    """A group may accept or lower the joint hit, never raise it; every hit that is reported lies in
    the pages it names.
    """
    rng = Random(seed)
    toy = Toy(
        layout_of(*ALL_LAWS, unit=rng.choice((1, 2, 4))), checkpoint_interval=rng.choice((None, 4))
    )
    prompts: list[list[int]] = []
    for i in range(8):
        start = rng.choice(prompts)[: rng.randint(1, 30)] if prompts else []
        prompts.append([*start, *(rng.randrange(3) for _ in range(rng.randint(1, 12)))])
        toy.serve(f"r{i}", prompts[-1], max_tokens=3)
    for prompt in prompts:
        found = toy.probe([*prompt, 99])
        unit = toy.layout.hash_unit
        assert found.hit <= min(min(found.match.reach) * unit, found.matched)
        hits = toy.warm_hits(prompt)
        assert all(0 <= hit <= unit * (i + 1) for i, hit in enumerate(hits)) and hits == sorted(
            hits
        )
    toy.assert_all_free()


def test_the_shortest_window_decides_in_any_order_of_groups() -> None:
    """Several windows: the hit is the least over all of them, not what the last one in the list
    allows.
    """
    prompt = list(range(24))
    hits = set()
    for groups in permutations((full(), window(8), window(3), state())):
        toy = Toy(layout_of(*groups))
        toy.serve("first", prompt, marks=(8,))
        found = toy.probe([*prompt[:12], 90, 91])
        assert found.matched == 12
        # After 4 tokens the long window happens to have its pages, kept for 8; the short one and
        # the state do not.
        early = toy.probe([*prompt[:4], 90, 91])
        assert sorted(early.match.reach) == [0, 0, 1, 1]
        hits.add((found.hit, early.hit))
    assert hits == {(8, 0)}


def test_computing_starts_at_the_joint_hit_and_leading_groups_write_nothing() -> None:
    """Full attention has 16 tokens, the state 8: work starts at 8. Nobody is trusted to bring the
    missing state, and pages that are there already are shared, not written again.
    """
    toy = Toy(layout_of(full(), state()))
    prompt = list(range(24))
    toy.serve("first", prompt, marks=(8,))
    toy.add("second", [*prompt[:16], 90, 91, 92])
    plan = toy.step()
    assert int(plan.start[0]) == 8
    assert written(plan, 0) == [16, 17, 18], "positions 8 to 15 lie in shared pages"
    assert 18 in written(plan, 1)
    toy.run()


def test_hits_go_in_hash_units_whatever_the_block_sizes() -> None:
    """Blocks of 16, 64, 4 and 2 tokens: a prompt of 48 known tokens hits 48. No common multiple of
    blocks is the granule.
    """
    toy = Toy(layout_of(full(16), full(64), window(8, 4), window(8, 2), unit=16, max_model_len=160))
    prompt = list(range(49))
    toy.serve("first", prompt)
    assert toy.hit(prompt[:48]) == 48
    assert toy.serve("again", prompt).num_cached_tokens == 48


def test_an_odd_sized_group_leaves_the_granule_alone() -> None:
    """A second model's group with entries every 27 tokens beside one of 12: the hash unit stays 12
    and padding stays small.
    """
    groups = (
        stream_group(Everything(), stride=12),
        stream_group(Everything(), stride=27),
        stream_group(Window(40)),
    )
    layout = solve_layout(
        groups, arena_bytes=1 << 22, profile=CPU, hash_unit=12, max_model_len=4096
    )
    assert layout.hash_unit == 12
    for group in layout.groups:
        page, used = group.page_units * layout.arena.unit_bytes, group.format.page_bytes
        entries = sum(slot.entries * slot.field.entry_bytes for slot in group.format.slots)
        assert page - used < layout.arena.unit_bytes, "no page is padded to another group's"
        assert group.block_tokens % group.group.stride == 0 and used - entries < 64


@pytest.mark.parametrize(
    ("unit", "blocks"),
    [
        (16, (256, 64, 4, 8)),
        (4, (256, 64, 4, 8)),
        (768, (128, 768, 768, 768)),
        (128, (128, 768, 768, 768)),
    ],
)
def test_any_set_of_nesting_block_sizes_starts(unit: int, blocks: tuple[int, ...]) -> None:
    """Blocks smaller than, equal to, or larger than the hash unit are all served; none is the base
    of the others.
    """
    groups = [
        full(blocks[0]),
        *(ToyGroup(law=Window(6), block_tokens=block) for block in blocks[1:]),
    ]
    toy = Toy(layout_of(*groups, unit=unit, slabs=40, max_model_len=2048), budget=512)
    prompt = [i % 97 for i in range(2 * unit + 3)]
    toy.serve("first", prompt, max_tokens=2)
    assert toy.serve("again", prompt, max_tokens=2).num_cached_tokens == 2 * unit
    toy.assert_all_free()


def test_block_sizes_that_do_not_nest_are_refused_by_name() -> None:
    """12 tokens and 27 tokens do not nest: said at start, with both numbers, rather than served
    with a huge granule.
    """
    with pytest.raises(ConfigError, match=r"block_tokens 27 and hash_unit 12"):
        solve_layout(
            (stream_group(Everything()),),
            arena_bytes=1 << 20,
            profile=CPU,
            hash_unit=12,
            max_model_len=512,
            block_tokens={0: 27},
        )


@pytest.mark.parametrize("groups", [(full(),), (full(), state()), (state(),), ALL_LAWS])
def test_an_exact_hit_absorbs_the_last_token_once(groups: tuple[ToyGroup, ...]) -> None:
    """A prompt of whole units that is all cached: its last token must be computed, from the state
    *before* it. Resuming on the state after it would absorb it twice; the resume point therefore
    lies before the last token.
    """
    for unit in (1, 4):
        toy = Toy(layout_of(*groups, unit=unit))
        prompt = list(range(16))
        toy.serve("first", prompt, marks=(16,))
        assert toy.hit(prompt) == 16, "all of it could be resumed, if another token followed"
        toy.add("again", prompt)
        plan = toy.step()
        assert int(plan.start[0]) == (16 - 1) // unit * unit < 16
        toy.run()


@pytest.mark.parametrize("length", [63, 64, 65, 66])
@pytest.mark.parametrize("unit", [1, 16, 64])
def test_a_rest_of_one_token_is_like_any_other(length: int, unit: int) -> None:
    """Around a block border the rest to compute is one token, or nearly a block; the hit is all
    whole units before the last token, and output does not change.
    """
    toy = Toy(layout_of(full(64), window(16, 16), state(), unit=unit, max_model_len=128))
    prompt = [i % 7 for i in range(length)]
    assert toy.serve("cold", prompt).num_cached_tokens == 0
    warm = toy.serve("warm", prompt)
    assert warm.num_cached_tokens == (length - 1) // unit * unit
    assert warm.output_token_ids == toy.requests["cold"].output_token_ids


def test_the_same_prompt_four_times_gives_one_answer() -> None:
    """At once, or one after another: identical greedy requests do not bleed into each other."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for together in (True, False):
        toy = Toy(layout_of(*ALL_LAWS))
        for i in range(4):
            toy.add(f"r{i}", prompt, max_tokens=9)
            if not together:
                toy.run()
        toy.run()
        assert len({tuple(request.output_token_ids) for request in toy.requests.values()}) == 1
        toy.assert_all_free()


def test_an_empty_prompt_is_refused_and_touches_nothing() -> None:
    """Zero tokens: a clean error."""
    toy = Toy(layout_of(full(), state()))
    with pytest.raises(ConfigError, match="empty"):
        toy.add("none", [])
    toy.assert_idle()
    assert toy.pool.free_slabs == toy.layout.arena.num_slabs


def chat(toy: Toy, turns: int = 8) -> list[tuple[int, int, int]]:
    """A conversation; per turn after the first (tokens recomputed, tokens new in the prompt, tokens
    of the last answer).
    """
    rng, tokens, turned = Random(3), list(range(10)), []
    answer: list[int] = []
    for turn in range(turns):
        new = [rng.randrange(50) for _ in range(5)]
        tokens += new
        request = toy.serve(f"turn {turn}", tokens, max_tokens=6)
        if turn:
            turned.append((len(tokens) - request.num_cached_tokens, len(new), len(answer)))
        answer = request.output_token_ids
        tokens += answer
    return turned


@pytest.mark.parametrize(
    ("groups", "interval"),
    [
        ((full(),), None),
        ((full(), window(8)), None),
        ((full(8), window(13, 8)), None),
        ((full(), state()), 4),
        (ALL_LAWS, 4),
    ],
    ids=["full", "window", "wide-blocks", "state-interval", "all-interval"],
)
def test_a_chat_recomputes_only_what_is_new(
    groups: tuple[ToyGroup, ...], interval: int | None
) -> None:
    """Every turn resumes at the end of the last one: computed are the new tokens, the last sampled
    one, and less than a unit more. Full and windowed groups reach that by themselves, states with a
    checkpoint per hash unit.
    """
    toy = Toy(layout_of(*groups, max_model_len=200), checkpoint_interval=interval)
    for computed, new, _ in chat(toy):
        assert computed <= new + 1 + toy.layout.hash_unit - 1


@pytest.mark.parametrize("groups", [(full(), state()), (full(), chunked(6), tail(4, 4)), ALL_LAWS])
def test_a_chat_without_interval_recomputes_no_more_than_the_last_answer(
    groups: tuple[ToyGroup, ...],
) -> None:
    """A state cannot be taken back to the last whole unit, so without an interval a turn resumes at
    the end of the last prompt.
    It is never more than that: no fall back to the start of the conversation.
    """
    toy = Toy(layout_of(*groups, max_model_len=200))
    for computed, new, answer in chat(toy):
        assert computed <= new + answer + 1 + toy.layout.hash_unit - 1


def test_every_request_says_why_its_hit_was_not_longer() -> None:
    """Never silently inert: the record of a request names the group that limited the hit, or where
    the key differs.
    """
    toy = Toy(layout_of(full(), window(8)))
    prompt = list(range(40))
    toy.serve("first", prompt)
    toy.serve("branch", [*prompt[:20], 90, 91, 92])
    limited = toy.scheduler.explain("branch")
    assert limited is not None and limited.hit_tokens == 0 and limited.matched_tokens == 20
    assert (
        limited.limited_by == ("window 8",)
        and "no checkpoint between tokens 0 and 20" in limited.reason
    )
    toy.serve("other", [90, *prompt])
    other = toy.scheduler.explain("other")
    assert other is not None and "the key differs in tokens 0 to 4" in other.reason
