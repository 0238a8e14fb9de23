"""What the same model costs under vLLM's rules: its groups, padding, planned concurrency, and how
many requests really fit.

Owns those rules, re-derived from its documentation (design document "Hybrid KV Cache Manager") and
from its figures for version 0.32 with prefix caching on. Knows streams and laws; knows no kind.

Rules. One pool of blocks; every group takes blocks of the same number of bytes. Caches of a sort
(law and bytes per token) are dealt out to groups of as many caches as the rarest sort has, or as
the most frequent one where that is less than half as many again. Blocks hold 16 tokens, 64 where
index keys stand beside latents; where states are kept, as many as make an attention page as large
as the largest state, which is padded to it. A model with compressed entries has blocks of 256
tokens for all that grows, of 64 for windows, and pages aligned to 576 bytes; compressors' blocks
are the largest power of two whose page is no larger than a window's. Planning charges a bounded
cache with all tokens in flight of two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from octavo.base import ceil_div, round_up
from octavo.plan.report import VllmGroup, VllmPlan
from octavo.spec.law import Law
from octavo.spec.stream import Stream

if TYPE_CHECKING:
    from octavo.plan.planner import Model

BLOCK_TOKENS, INDEXED_TOKENS = 16, 64
COMPRESSED_TOKENS, WINDOW_TOKENS, COMPRESSED_ALIGN = 256, 64, 576
IN_FLIGHT = 16384
"""Tokens of two steps of 8,192 each, which asynchronous scheduling may have in flight."""

GROW_SIZE = 1.5
"""The most frequent sort decides the size of groups while it has less than this many times the
rarest one's caches.
"""

STATE_BLOCKS = 2
"""Blocks of a state per request: the newest, and the one that the running step writes."""

_CHECKPOINTED = frozenset({"conv_x", "conv_b", "conv_c"})
"""Fields of states whose mixer keeps one block more, as a checkpoint inside a prompt."""


class _Mismatch(Exception):
    """vLLM's rules do not apply; the message says why."""


@dataclass(frozen=True, kw_only=True)
class _Sort:
    """Caches of one law and size: ``count`` of them, ``page_bytes`` each per block of
    ``block_tokens``.
    """

    stream: Stream
    count: int
    block_tokens: int
    page_bytes: int

    @property
    def law(self) -> Law:
        return self.stream.law

    def planned(self, n: int) -> int:
        """Blocks that its planning charges for a request of ``n`` tokens."""
        law = self.law
        if law.reads_before_writing:
            names = {field.name for field in self.stream.fields}
            return STATE_BLOCKS + (1 if names >= _CHECKPOINTED else 0)
        if law.prefix is None:
            return ceil_div(n, self.block_tokens)
        if law.next_release(0) is not None:
            return ceil_div(min(law.span + IN_FLIGHT, n), self.block_tokens)
        return ceil_div(min(law.span - 1 + IN_FLIGHT, n), self.block_tokens) + 1

    def held(self, n: int) -> int:
        """Blocks that a request holds after decoding up to ``n`` tokens; what the last step still
        read is among them.
        """
        if self.law.reads_before_writing:
            return 1
        # It sees a compressor's open group and overlap as a window of as many tokens.
        window = self.law.alignment > 1 and self.law.next_release(0) is None
        first = n - self.law.span if window else self.law.first(n - 1)
        return ceil_div(n, self.block_tokens) - max(0, first) // self.block_tokens


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """Groups as lists of sorts with their shares of caches, and the bytes of a block of all of
    them.
    """

    groups: tuple[tuple[tuple[_Sort, int], ...], ...]
    block_bytes: int


def compare(model: Model, context: int, *, memory: int) -> VllmPlan:
    """The model's streams under vLLM's rules, for requests of ``context`` tokens in ``memory``
    bytes.
    """
    return plan_streams(
        [m.stream for group in model.groups for m in group.members],
        _indexed(model),
        context,
        memory=memory,
    )


def _indexed(model: Model) -> bool:
    """Does a layer keep two growing streams, one of which chooses among the entries of the
    other?
    """
    growing = [
        member.layer
        for group in model.groups
        for member in group.members
        if member.stream.law.prefix is None
    ]
    return len(growing) > len(set(growing))


def plan_streams(
    streams: Sequence[Stream], indexed: bool, n: int, *, memory: int, decoded: int = 0
) -> VllmPlan:
    """Plan for requests of ``n`` tokens, of which as many more as ``decoded`` are decoded before
    holding is measured.
    """
    try:
        pool = _pool(streams, indexed)
    except _Mismatch as mismatch:
        return VllmPlan(
            groups=(),
            block_bytes=0,
            num_blocks=0,
            planned=0,
            resident=0,
            held_bytes=0,
            min_hit_tokens=0,
            reason=str(mismatch),
        )
    groups = tuple(_show(parts, pool.block_bytes, n, n + decoded) for parts in pool.groups)
    blocks = memory // pool.block_bytes
    planned, held = (
        sum(group.planned_blocks for group in groups),
        sum(group.held_blocks for group in groups),
    )
    # One block is the null block; the last request is admitted by the planned figure, those before
    # it hold what they hold.
    resident = 1 + (blocks - 1 - planned) // held if planned < blocks else 0
    return VllmPlan(
        groups=groups,
        block_bytes=pool.block_bytes,
        num_blocks=blocks,
        planned=blocks / planned,
        resident=resident,
        held_bytes=held * pool.block_bytes,
        min_hit_tokens=lcm(*(group.block_tokens for group in groups)),
    )


def _show(parts: Sequence[tuple[_Sort, int]], block_bytes: int, n: int, held_at: int) -> VllmGroup:
    first = parts[0][0]
    used = sum(sort.page_bytes * count for sort, count in parts)
    return VllmGroup(
        sort=first.law.describe(),
        layers=sum(count for _, count in parts),
        block_tokens=first.block_tokens,
        page_bytes=used,
        padded_bytes=block_bytes - used,
        planned_blocks=first.planned(n),
        held_blocks=first.held(held_at),
    )


def _pool(streams: Sequence[Stream], indexed: bool) -> _Pool:
    counts: dict[Stream, int] = {}
    for stream in streams:
        counts[stream] = counts.get(stream, 0) + 1
    if any(stream.stride > 1 for stream in counts):
        return _compressed_pool(counts)
    if all(stream.law.prefix is None for stream in counts):
        block = INDEXED_TOKENS if indexed else BLOCK_TOKENS
        sorts = [
            _Sort(stream=s, count=c, block_tokens=block, page_bytes=block * s.entry_bytes)
            for s, c in counts.items()
        ]
        return _Pool(
            groups=(tuple((s, s.count) for s in sorts),),
            block_bytes=sum(s.page_bytes * s.count for s in sorts),
        )
    return _dealt_pool(
        _with_states(counts)
        if any(s.law.reads_before_writing for s in counts)
        else _one_page_size(counts)
    )


def _with_states(counts: dict[Stream, int]) -> list[_Sort]:
    """Block sizes by which an attention page is as large as the largest state."""
    attention = [stream for stream in counts if not stream.law.reads_before_writing]
    if not attention:
        raise _Mismatch("its rules for models with states and no attention are not re-derived")
    token, state = (
        attention[0].entry_bytes,
        max(s.entry_bytes for s in counts if s.law.reads_before_writing),
    )
    if any(stream.entry_bytes != token for stream in attention):
        raise _Mismatch("attention layers of different sizes beside states")
    block = BLOCK_TOKENS * ceil_div(state, BLOCK_TOKENS * token)
    return [
        _Sort(stream=s, count=c, block_tokens=block, page_bytes=block * token)
        for s, c in counts.items()
    ]


def _one_page_size(counts: dict[Stream, int]) -> list[_Sort]:
    """Blocks of smaller entries hold more tokens, so that all pages are equal."""
    largest = max(stream.entry_bytes for stream in counts)
    if odd := [stream.entry_bytes for stream in counts if largest % stream.entry_bytes]:
        raise _Mismatch(f"entries of {odd[0]:,} and {largest:,} bytes make no equal pages")
    return [
        _Sort(
            stream=s,
            count=c,
            block_tokens=BLOCK_TOKENS * largest // s.entry_bytes,
            page_bytes=BLOCK_TOKENS * largest,
        )
        for s, c in counts.items()
    ]


def _dealt_pool(sorts: Sequence[_Sort]) -> _Pool:
    """Deal caches of every sort out to groups of one size."""
    least, most = min(sort.count for sort in sorts), max(sort.count for sort in sorts)
    size = most if most < GROW_SIZE * least else least
    groups = []
    for sort in sorts:
        parts = ceil_div(sort.count, size)
        groups += [((sort, ceil_div(sort.count - part, parts)),) for part in range(parts)]
    return _Pool(groups=tuple(groups), block_bytes=size * sorts[0].page_bytes)


def _compressed_pool(counts: dict[Stream, int]) -> _Pool:
    """All that grows is one group; the others are split until none has a larger block."""
    rings = [stream for stream in counts if stream.law.prefix is not None]
    # What has a whole past token per entry; compressors keep states aligned to their groups.
    windows = [stream for stream in rings if stream.law.alignment == 1]
    if not windows:
        raise _Mismatch("compressed entries without a window")
    window_page = WINDOW_TOKENS * max(stream.entry_bytes for stream in windows)
    by_law: dict[tuple[Law | None, int], list[_Sort]] = {}
    for stream, count in counts.items():
        block = _compressed_block(stream, rings, windows, window_page)
        page = round_up(block // stream.stride * stream.entry_bytes, COMPRESSED_ALIGN)
        sort = _Sort(stream=stream, count=count, block_tokens=block, page_bytes=page)
        by_law.setdefault((None if stream.law.prefix is None else stream.law, block), []).append(
            sort
        )
    sizes = {
        key: sum(sort.page_bytes * sort.count for sort in sorts) for key, sorts in by_law.items()
    }
    pool = sizes[None, COMPRESSED_TOKENS]
    groups = []
    for key, sorts in by_law.items():
        parts = ceil_div(sizes[key], pool)
        groups += [
            tuple((sort, ceil_div(sort.count - part, parts)) for sort in sorts)
            for part in range(parts)
        ]
    return _Pool(groups=tuple(groups), block_bytes=pool)


def _compressed_block(
    stream: Stream, rings: Sequence[Stream], windows: Sequence[Stream], window_page: int
) -> int:
    if stream.law.prefix is None:
        return COMPRESSED_TOKENS
    if stream in windows:
        return WINDOW_TOKENS
    widest = max(other.entry_bytes for other in rings if other.law == stream.law)
    return 1 << (window_page // widest).bit_length() - 1
