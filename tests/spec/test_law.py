"""Laws against brute force: everything the cache derives from ``needs(n)`` is recomputed here token
by token.

Owns the properties every law must have. Knows laws, groups and block arithmetic only.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base import ConfigError, most_blocks
from octavo.spec.group import Group, Member
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Snapshot, Tail, Window
from octavo.spec.stream import Field, Stream

FAR = 60
"""Tokens after which every law drawn below has reached its steady state and repeated it."""

sizes = st.integers(1, 9)
laws: st.SearchStrategy[Law] = st.one_of(
    st.just(Everything()),
    st.just(Snapshot()),
    st.builds(Window, sizes),
    st.builds(Chunk, sizes),
    st.builds(SinkWindow, sizes, sizes),
    st.builds(Tail, sizes, st.integers(0, 9)),
)
bounded = laws.filter(lambda law: law.prefix is not None)
places = st.integers(0, FAR)


def needed(law: Law, n: int) -> set[int]:
    """``needs(n)`` as plain tokens."""
    return {token for start, stop in law.needs(n) for token in range(start, stop)}


def let_go(law: Law, n: int) -> set[int]:
    """Tokens resident for n - 1, or computed then, that n asks for no more."""
    return (needed(law, n - 1) | {n - 1}) - needed(law, n)


def group_of(law: Law) -> Group:
    """A group with one one-byte stream under ``law``."""
    stream = Stream(name="toy", law=law, fields=(Field(name="x", shape=(1,), dtype="uint8"),))
    return Group(law=law, members=(Member(layer=0, mixer="toy", stream=stream),))


@given(law=laws, n=places)
def test_intervals_are_ascending_disjoint_nonempty_and_of_the_past(law: Law, n: int) -> None:
    intervals = law.needs(n)
    edges = [edge for interval in intervals for edge in interval]
    assert all(start < stop for start, stop in intervals)
    assert all(
        before < after for (_, before), (after, _) in zip(intervals, intervals[1:], strict=False)
    )
    assert not edges or (edges[0] >= 0 and edges[-1] <= n)


@given(law=laws)
def test_no_resurrection(law: Law) -> None:
    for n in range(FAR):
        assert needed(law, n + 1) <= needed(law, n) | {n}


@given(law=laws, start=places, length=st.integers(1, 20))
def test_a_step_reads_no_more_of_the_past_than_its_first_token(
    law: Law, start: int, length: int
) -> None:
    asked = set().union(*(needed(law, m) for m in range(start, start + length)))
    assert {token for token in asked if token < start} <= needed(law, start)


@given(law=laws)
def test_prefix_is_what_is_never_let_go(law: Law) -> None:
    for n in range(FAR):
        kept = n if law.prefix is None else min(law.prefix, n)
        assert set(range(kept)) <= needed(law, n)
    if law.prefix is not None:
        assert law.prefix not in needed(law, FAR)


@given(law=bounded)
def test_span_is_reached_and_never_passed(law: Law) -> None:
    assert law.prefix is not None
    itself = 0 if law.reads_before_writing else 1
    most = max(
        len(needed(law, n) - set(range(law.prefix))) + itself for n in range(law.prefix, FAR)
    )
    assert most == law.span


@given(law=bounded, n=places)
def test_what_is_kept_behind_the_prefix_is_one_run_that_ends_at_n(law: Law, n: int) -> None:
    assert law.prefix is not None
    behind = needed(law, n) - set(range(law.prefix))
    assert behind == set(range(n - len(behind), n))


@given(law=bounded, n=places)
def test_starts_behind_the_prefix_are_aligned(law: Law, n: int) -> None:
    assert law.prefix is not None
    behind = needed(law, n) - set(range(law.prefix))
    assert not behind or min(behind) == law.prefix or min(behind) % law.alignment == 0


@given(law=laws, n=places)
def test_nothing_is_let_go_before_the_next_release(law: Law, n: int) -> None:
    release = law.next_release(n)
    if release is not None:
        assert n < release <= n + law.span
        assert not any(let_go(law, m) for m in range(n + 1, release))
        assert let_go(law, release)


@given(law=laws.filter(lambda law: law.next_release(0) is None), n=st.integers(1, FAR))
def test_laws_without_releases_slide(law: Law, n: int) -> None:
    assert len(let_go(law, n)) <= max(law.alignment, getattr(law, "ratio", 1))


@given(law=bounded, block_tokens=st.integers(1, 8))
def test_table_columns_hold_every_block_that_is_alive_at_once(law: Law, block_tokens: int) -> None:
    fixed, turning = group_of(law).table_columns(block_tokens)
    assert fixed is not None
    for n in range(FAR):
        tokens = needed(law, n) if law.reads_before_writing else needed(law, n) | {n}
        alive = {token // block_tokens for token in tokens}
        columns = {block if block < fixed else fixed + (block - fixed) % turning for block in alive}
        assert len(columns) == len(alive)
        assert all(column < fixed + turning for column in columns)


@given(law=bounded)
def test_a_ring_has_no_column_that_no_token_fills(law: Law) -> None:
    fixed, turning = group_of(law).table_columns(1)
    assert fixed == law.prefix
    assert turning == max(1, law.span)


@given(tokens=st.integers(0, 30), block_tokens=st.integers(1, 9), alignment=st.integers(1, 12))
def test_most_blocks_is_the_worst_start(tokens: int, block_tokens: int, alignment: int) -> None:
    starts = range(0, block_tokens * alignment, alignment)
    worst = max(
        len({token // block_tokens for token in range(start, start + tokens)}) for start in starts
    )
    assert most_blocks(tokens, block_tokens, alignment) == worst


def test_equal_laws_are_one_group_key() -> None:
    assert len({Window(8), Window(8), Window(4), Everything(), Everything(), SinkWindow(2, 8)}) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(0),
        lambda: Chunk(0),
        lambda: SinkWindow(0, 4),
        lambda: SinkWindow(4, 0),
        lambda: Tail(0),
    ],
)
def test_sizes_below_one_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match="at least 1"):
        make()


def test_negative_overlap_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        Tail(4, -1)


@pytest.mark.parametrize(
    ("law", "n", "intervals"),
    [
        (Everything(), 5, ((0, 5),)),
        (Window(4), 2, ((0, 2),)),
        (Window(4), 9, ((6, 9),)),
        (Window(1), 9, ()),
        (Chunk(4), 8, ()),
        (Chunk(4), 11, ((8, 11),)),
        (SinkWindow(2, 4), 5, ((0, 5),)),
        (SinkWindow(2, 4), 9, ((0, 2), (6, 9))),
        (Tail(4, 4), 10, ((4, 10),)),
        (Tail(128), 130, ((128, 130),)),
        (Snapshot(), 0, ()),
        (Snapshot(), 9, ((8, 9),)),
    ],
)
def test_examples(law: Law, n: int, intervals: tuple[tuple[int, int], ...]) -> None:
    assert law.needs(n) == intervals
