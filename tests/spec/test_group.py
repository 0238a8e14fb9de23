"""Groups: the inside of pages, and table columns against what laws really ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base import ConfigError, blocks_of
from octavo.spec.group import FIELD_ALIGN, Group, Member
from octavo.spec.law import Chunk, Everything, SinkWindow, Snapshot, Tail, Window
from octavo.spec.stream import Field, Stream

BOUNDED = st.one_of(
    st.just(Snapshot()),
    st.builds(Window, st.integers(1, 24)),
    st.builds(Chunk, st.integers(1, 24)),
    st.builds(SinkWindow, st.integers(1, 12), st.integers(1, 24)),
    st.builds(Tail, st.integers(1, 12), st.integers(0, 12)),
)


def make(law, strides=(1,), layers=1, shape=(2, 5)):
    streams = [
        Stream(
            name=f"s{stride}",
            law=law,
            stride=stride,
            fields=(
                Field(name="k", shape=shape, dtype="bfloat16", shard="heads"),
                Field(name="scale", shape=(1,), dtype="float32"),
            ),
        )
        for stride in strides
    ]
    return Group(
        law=law,
        members=tuple(Member(layer=i, mixer="m", stream=s) for i in range(layers) for s in streams),
    )


@given(
    strides=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3),
    layers=st.integers(1, 4),
    times=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40)),
)
def test_slots_lie_in_order_aligned_and_apart(strides, layers, times, shape):
    group = make(Everything(), strides, layers, shape)
    form = group.page_format(times * group.stride)
    assert [(slot.member, slot.field) for slot in form.slots] == [
        (m, f) for m in group.members for f in m.stream.fields
    ]
    end = 0
    for slot in form.slots:
        assert slot.offset % FIELD_ALIGN == 0 and 0 <= slot.offset - end < FIELD_ALIGN
        assert slot.entries * slot.member.stream.stride == form.block_tokens
        end = slot.offset + slot.entries * slot.field.entry_bytes
    assert end <= form.page_bytes < end + FIELD_ALIGN and form.page_bytes % FIELD_ALIGN == 0


def test_blocks_that_cut_an_entry_are_refused():
    group = make(Everything(), strides=(4, 6))
    assert group.stride == 12
    for block_tokens in (0, -12, 4, 18):
        with pytest.raises(ConfigError, match="stride 12"):
            group.page_format(block_tokens)


@given(law=BOUNDED, block_tokens=st.integers(1, 20))
def test_columns_hold_what_a_law_asks_for_and_no_more(law, block_tokens):
    fixed, turning = make(law).table_columns(block_tokens)
    assert fixed is not None and turning >= 1
    most = 0
    for n in range(400):
        written = () if law.reads_before_writing and n else ((n, n + 1),)
        blocks = blocks_of((*law.needs(n), *written), block_tokens)
        behind = [block for block in blocks if block >= fixed]
        assert len({(block - fixed) % turning for block in behind}) == len(behind), (
            "two live blocks in one column"
        )
        assert all(block in blocks for block in range(min(fixed, n // block_tokens + 1)))
        most = max(most, len(behind))
    # Law.alignment says what starts are a multiple of, not which multiples occur: a tail whose
    # overlap is no multiple of its ratio always starts at the same place in its ratio, and may be
    # given one column more than it fills.
    slack = 1 if isinstance(law, Tail) and law.overlap % law.ratio else 0
    assert most <= turning <= most + slack


def test_unbounded_groups_have_a_column_per_block():
    assert make(Everything()).table_columns(16) == (None, 0)


@given(layers=st.integers(1, 12), data=st.data())
def test_parts_keep_every_layer_whole_and_in_order(layers, data):
    parts = data.draw(st.integers(1, layers))
    group = make(Window(8), strides=(1, 2), layers=layers)
    split = group.split(parts)
    assert len(split) == parts and all(part.law == group.law for part in split)
    assert tuple(member for part in split for member in part.members) == group.members
    sizes = [len(part.layers) for part in split]
    assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ConfigError, match="parts"):
        group.split(layers + 1)


def test_bytes_needed_is_the_sum_of_the_members():
    group = make(Window(8), strides=(1, 4), layers=2)
    one = 2 * 5 * 2 + 4
    assert group.bytes_needed(5) == 2 * (5 * one + 1 * one)
    assert group.bytes_needed(100) == sum(
        member.stream.bytes_needed(100) for member in group.members
    )
