"""Block sizes, table columns and what a request can hold: against brute force and against a real
model's numbers.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base import CapacityError, ConfigError, blocks_of
from octavo.cache.layout import (
    CPU,
    GPU,
    PAGES_PER_GROUP,
    PROFILES,
    CacheLayout,
    ideal_bytes,
    nests,
    pages_by_bucket,
    request_bytes,
    request_pages,
    solve_layout,
)
from octavo.spec.group import Group, Member
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Snapshot, Tail, Window
from octavo.spec.stream import Field, Stream

MIB, GIB = 2**20, 2**30


def group(
    law: Law, *, layers: int = 1, heads: int = 1, dim: int = 256, stride: int = 1, first: int = 0
) -> Group:
    fields = tuple(
        Field(name=name, shape=(heads, dim), dtype="bfloat16", shard="heads") for name in ("k", "v")
    )
    stream = Stream(name="kv", law=law, fields=fields, stride=stride)
    return Group(
        law=law,
        members=tuple(Member(layer=first + i, mixer="attn", stream=stream) for i in range(layers)),
    )


def gemma3_270m() -> list[Group]:
    return [group(Window(512), layers=15), group(Everything(), layers=3, first=15)]


def solve(groups: list[Group], **changes) -> CacheLayout:
    options = {
        "arena_bytes": GIB,
        "profile": CPU,
        "hash_unit": 16,
        "max_model_len": 32768,
    } | changes
    return solve_layout(groups, **options)


@st.composite
def laws(draw: st.DrawFn) -> Law:
    small = st.integers(1, 20)
    made = [
        st.just(Everything()),
        st.just(Snapshot()),
        st.builds(Window, small),
        st.builds(Chunk, small),
        st.builds(SinkWindow, small, small),
        st.builds(Tail, small, st.integers(0, 9)),
    ]
    return draw(st.one_of(made))


@st.composite
def models(draw: st.DrawFn) -> list[Group]:
    made = []
    for law in draw(st.lists(laws(), min_size=1, max_size=4, unique=True)):
        stride = 1 if isinstance(law, Snapshot) else draw(st.sampled_from([1, 1, 1, 2, 4]))
        made.append(
            group(
                law,
                layers=draw(st.integers(1, 3)),
                dim=draw(st.sampled_from([8, 96, 128])),
                stride=stride,
            )
        )
    return made


def test_gemma3_270m_on_cpu_keeps_close_to_the_ideal():
    layout = solve(gemma3_270m(), arena_bytes=64 * 4 * MIB)
    window, everything = layout.groups
    assert window.block_tokens == 64 and (window.fixed, window.turning) == (0, 9)
    assert everything.block_tokens == 64 and everything.fixed is None
    assert window.format.page_bytes == 15 * 2 * 64 * 512
    ideal = 3 * 1024 * 32768 + 15 * 1024 * 511
    assert ideal_bytes(layout, 32768) == ideal
    assert request_pages(layout, 32768) == (9, 512)
    assert ideal <= request_bytes(layout, 32768) <= 1.03 * ideal


def test_profiles_choose_as_kernels_want():
    for window, cpu in ((512, {64}), (4096, {64}), (128, {32, 64}), (16, {8, 16}), (4, {1, 2, 4})):
        (chosen,) = solve([group(Window(window))]).groups
        assert chosen.block_tokens in cpu
    narrow, wide = group(Everything(), heads=8, dim=64), group(Everything(), heads=8, dim=512)
    assert [solve([g]).groups[0].block_tokens for g in (narrow, wide)] == [128, 32]
    assert [solve([g], profile=GPU).groups[0].block_tokens for g in (narrow, wide)] == [32, 16]
    assert solve([group(Snapshot())]).groups[0].block_tokens == 1
    assert solve([group(Chunk(8192))]).groups[0].turning == 8192 // 64
    assert PROFILES["cpu"] is CPU and PROFILES["gpu"] is GPU
    with pytest.raises(TypeError):
        PROFILES["tpu"] = CPU  # type: ignore[index]


@pytest.mark.parametrize(
    ("stride", "unit"), [(4, 16), (128, 16), (4, 256), (128, 256), (3, 16), (1, 24), (1, 1), (6, 4)]
)
@pytest.mark.parametrize("law", [Everything(), Window(512), Tail(128, 128)])
def test_blocks_hold_whole_entries_and_nest_with_hash_units(stride, unit, law):
    (chosen,) = solve([group(law, stride=stride)], hash_unit=unit).groups
    assert chosen.block_tokens % stride == 0
    assert nests(chosen.block_tokens, unit)
    assert chosen.block_tokens <= max(128, stride * unit)


def test_overrides_are_obeyed_or_refused_but_never_changed():
    groups = [group(Window(7), dim=8), group(Everything(), dim=8)]
    layout = solve(
        groups, block_tokens={0: 4, 1: 2}, hash_unit=2, arena_bytes=4096, max_model_len=64
    )
    assert [g.block_tokens for g in layout.groups] == [4, 2]
    with pytest.raises(ConfigError, match="one must be a multiple of the other"):
        solve(groups, block_tokens={0: 3})
    with pytest.raises(ConfigError, match="stride 4"):
        solve([group(Everything(), stride=4)], block_tokens={0: 2})
    with pytest.raises(ConfigError, match=r"\[2\]"):
        solve(groups, block_tokens={2: 16})
    with pytest.raises(ConfigError, match="groups is empty"):
        solve([])
    with pytest.raises(CapacityError):
        solve([group(Everything(), layers=4)], block_tokens={0: 16}, arena_bytes=4 * 1024 * 16 - 1)


def test_small_arenas_get_smaller_blocks_before_groups_are_split():
    big = [group(Everything(), layers=32, heads=8, dim=128)]
    (roomy,) = solve(big, arena_bytes=16 * GIB).groups
    (tight,) = solve(big, arena_bytes=PAGES_PER_GROUP * 32 * 4096 * 16).groups
    assert roomy.block_tokens == 128 and tight.block_tokens == 16
    split = solve(big, arena_bytes=PAGES_PER_GROUP * 8 * 4096 * 16).groups
    assert [len(part.group.layers) for part in split] == [8, 8, 8, 8]
    assert {part.block_tokens for part in split} == {16}
    assert [layer for part in split for layer in part.group.layers] == list(range(32))
    tiny = solve(big, arena_bytes=PAGES_PER_GROUP * 4096 * 4).groups
    assert len(tiny) == 32 and {part.block_tokens for part in tiny} == {4}


def test_large_states_are_split_and_stay_one_token_wide():
    state = Stream(
        name="ssm",
        law=Snapshot(),
        fields=(Field(name="state", shape=(64, 64, 128), dtype="float32"),),
    )
    groups = [
        Group(
            law=Snapshot(),
            members=tuple(Member(layer=i, mixer="m", stream=state) for i in range(24)),
        )
    ]
    layout = solve([*groups, *gemma3_270m()], arena_bytes=256 * MIB)
    states = [g for g in layout.groups if g.group.law == Snapshot()]
    assert len(states) > 1 and all(
        g.block_tokens == 1 and (g.fixed, g.turning) == (0, 1) for g in states
    )
    assert all(PAGES_PER_GROUP * 3 * g.format.page_bytes <= 256 * MIB for g in layout.groups)


def test_no_more_columns_than_a_longest_request_has_blocks():
    layout = solve(
        [group(Window(512)), group(SinkWindow(100, 64))],
        max_model_len=96,
        block_tokens={0: 16, 1: 16},
    )
    assert [(g.fixed, g.turning) for g in layout.groups] == [(0, 6), (6, 1)]
    assert request_pages(layout, 96) == (6, 6)


@settings(max_examples=150, deadline=None)
@given(
    groups=models(),
    n=st.integers(0, 70),
    unit=st.sampled_from([1, 2, 4, 16]),
    profile=st.sampled_from([CPU, GPU]),
)
def test_demand_against_brute_force(groups, n, unit, profile):
    layout = solve(groups, hash_unit=unit, profile=profile, max_model_len=80, arena_bytes=4 * MIB)
    ideal = max(sum(g.group.bytes_needed(m) for g in layout.groups) for m in range(n + 1))
    assert ideal_bytes(layout, n) == ideal
    assert request_bytes(layout, n) >= ideal
    pages = request_pages(layout, n)
    for chosen, charged in zip(layout.groups, pages, strict=True):
        law, block = chosen.group.law, chosen.block_tokens
        writing = 0 if law.reads_before_writing else 1
        touched = [len(blocks_of((*law.needs(m), (m, m + writing)), block)) for m in range(n)]
        at_most = max([*touched, len(blocks_of(law.needs(n), block))])
        assert at_most <= charged
        if chosen.fixed is None:
            assert charged == at_most
        elif n >= block * (chosen.fixed + chosen.turning):
            # The worst alignment may lie further on than n: the ring is charged as soon as a
            # request is long enough to fill it.
            ring = max(
                len(blocks_of((*law.needs(m), (m, m + writing)), block)) for m in range(1, 400)
            )
            uneven = isinstance(law, Tail) and law.overlap % law.ratio
            assert ring <= charged <= ring + (1 if uneven else 0)
    by_bucket = pages_by_bucket(layout, pages)
    assert sum(by_bucket) == sum(pages) and len(by_bucket) == len(layout.arena.page_units)
    for chosen in layout.groups:
        assert chosen.page_units == layout.arena.page_units[chosen.bucket]
        assert chosen.page_units * layout.arena.unit_bytes >= chosen.format.page_bytes


def test_ideal_of_a_chunked_model_is_before_the_border():
    layout = solve(
        [group(Chunk(8192), layers=36), group(Everything(), layers=12, first=36)],
        max_model_len=1 << 20,
    )
    n = 8192 * 5 + 100
    assert ideal_bytes(layout, n) == max(
        1024 * (36 * 8191 + 12 * (8192 * 5 - 1)), 1024 * (36 * 100 + 12 * n)
    )
