"""What a step reads and writes of a group, list by list, against walks over the table."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.reads import Parts, Reads
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Snapshot, Tail, Window
from tests.ops.worlds import make_parts, make_reads

LAWS = st.one_of(
    st.just(Everything()),
    st.just(Snapshot()),
    st.builds(Window, st.integers(1, 30)),
    st.builds(Chunk, st.integers(1, 30)),
    st.builds(Tail, st.integers(1, 9), st.integers(0, 9)),
    st.builds(SinkWindow, st.integers(1, 20), st.integers(1, 20)),
)


def where(reads: Reads, request: int, position: int) -> tuple[int, int]:
    """Page and row of a token, by the definition."""
    block, row = divmod(position, reads.block_tokens)
    if reads.fixed is not None and block >= reads.fixed:
        block = reads.fixed + (block - reads.fixed) % reads.turning
    return int(reads.table[reads.rows[request], block]), row


def entries(parts: Parts) -> list[tuple[int, int]]:
    """(request, position) of every entry."""
    return [
        (request, position)
        for request, (start, stop) in enumerate(
            zip(parts.start.tolist(), parts.stop.tolist(), strict=True)
        )
        for position in range(start, stop)
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    law=LAWS,
    block=st.integers(1, 9),
    ring=st.booleans(),
    fewer=st.booleans(),
)
def test_lists_say_what_the_description_says(
    seed: int, law: Law, block: int, ring: bool, fewer: bool
) -> None:
    parts = make_parts(seed, fewer=fewer)
    reads = make_reads(seed, parts, law, block=block, ring=ring, fresh=0.5)
    own = entries(parts)
    assert parts.positions.tolist() == [position for _, position in own]
    assert parts.num_entries == len(own)
    for writes, late in ((reads.before, [False]), (reads.after, [True]), (reads.stored, [0, 1])):
        expected = [
            (entry, *where(reads, request, position))
            for entry, (request, position) in enumerate(own)
            if reads.pages[entry] >= 0 and reads.fresh[request] in late
        ]
        made = (writes.entries.tolist(), writes.pages.tolist(), writes.rows.tolist())
        assert list(zip(*made, strict=True)) == expected
    past = reads.past
    for request, start in enumerate(parts.start.tolist()):
        needed = [p for a, b in law.needs(start) for p in range(a, b)]
        mine = slice(*past.start_loc[request : request + 2].tolist())
        assert past.positions[mine].tolist() == needed
        found = zip(past.pages[mine].tolist(), past.rows[mine].tolist(), strict=True)
        assert list(found) == [where(reads, request, p) for p in needed]
    requests = parts.query_requests.tolist()
    for query, position in enumerate(parts.query_positions.tolist()):
        assert (requests[query], position) in own
        assert law.prefix is None or reads.first[query] == law.first(position)
        assert reads.query_rows[query] == reads.rows[requests[query]]
    singles = [requests[query] for query in parts.single_queries.tolist()]
    assert singles == parts.singles.tolist() == [i for i in set(requests) if requests.count(i) == 1]
    assert parts.longs == [i for i in sorted(set(requests)) if requests.count(i) > 1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), stride=st.integers(1, 5), blocks=st.integers(1, 4))
def test_closed_entries(seed: int, stride: int, blocks: int) -> None:
    parts = make_parts(seed)
    reads = make_reads(seed, parts, Everything(), block=stride * blocks)
    reads.pages[::3] = -1
    expected, written = [], []
    for entry, (request, position) in enumerate(entries(parts)):
        if (position + 1) % stride == 0:
            if reads.pages[entry] >= 0:
                row = position % reads.block_tokens // stride
                written.append((len(expected), int(reads.pages[entry]), row))
            expected.append((request, position // stride))
    closed = reads.closed(stride)
    made = (closed.requests.tolist(), closed.numbers.tolist())
    assert list(zip(*made, strict=True)) == expected
    writes = closed.writes
    lists = (writes.entries.tolist(), writes.pages.tolist(), writes.rows.tolist())
    assert list(zip(*lists, strict=True)) == written
    assert reads.closed(stride) is closed


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), law=st.builds(Window, st.integers(1, 30)))
def test_places_of_single_tokens(seed: int, law: Law) -> None:
    parts = make_parts(seed)
    reads = make_reads(seed, parts, law, ring=True)
    past, rows = reads.past.positions.tolist(), []
    cuts = reads.past.start_loc.tolist()
    for request, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        rows += [(request, position) for position in past[low:high]]
    rows += entries(parts)
    for row, (request, position) in enumerate(rows):
        found = reads.places.of(torch.tensor(request), torch.tensor(position))
        assert rows[int(found)] == rows[row]


def test_locating_entries_that_stay() -> None:
    parts = make_parts(4)
    reads = make_reads(4, parts, Everything(), block=5)
    requests = torch.arange(parts.num_requests)
    last = torch.from_numpy(parts.stop - 1)
    pages, rows = reads.locate(requests, last)
    for request in range(parts.num_requests):
        expected = where(reads, request, int(last[request]))
        assert (int(pages[request]), int(rows[request])) == expected
    assert reads.locate(requests, torch.full_like(last, -7))[1].tolist() == [0] * len(requests)


def test_what_is_derived_is_made_once() -> None:
    reads = make_reads(0, make_parts(0), Everything())
    made: list[Reads] = []

    def derive(given: Reads) -> int:
        made.append(given)
        return 7

    assert reads.once(derive) == reads.once(derive) == 7 and made == [reads]
    assert isinstance(reads.table, np.ndarray)
