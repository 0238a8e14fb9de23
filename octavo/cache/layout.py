"""Where tokens meet bytes: block sizes for every group, and the arena they are cut from.

Owns ``CacheLayout``, the device profiles, the choice of ``block_tokens``, and what a request of
some length can hold. Knows laws and byte counts; knows no kinds, no tables and no particular
request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from types import MappingProxyType

import numpy as np

from octavo.base import ConfigError, ceil_div
from octavo.memory.layout import ArenaLayout, solve_arena
from octavo.spec.group import Group, PageFormat
from octavo.spec.law import Count, Law

PAGES_PER_GROUP = 8
"""Pages of every group that an arena should hold at once; blocks shrink, then groups are split,
until it does.
"""


_SEARCH = 1024
"""Lengths looked at together in the search for a request's worst moment."""


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One group with its block size decided.

    fixed, turning: table columns of one request (``Group.table_columns``); fixed is None where
        blocks are never let go.
    """

    group: Group
    format: PageFormat
    bucket: int
    page_units: int
    fixed: int | None
    turning: int

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.format.block_tokens

    def most_pages(self, n: Count) -> Count:
        """Pages that one request can hold at most while its first ``n`` tokens are computed.
        Integer or array in, the same out.

        ``needs(m)`` of all ``m <= n``, rounded outward to blocks, together with the block being
        written.
        """
        blocks = (n + self.block_tokens - 1) // self.block_tokens
        if self.fixed is None:
            return blocks
        return blocks - (blocks - self.fixed - self.turning) * (blocks > self.fixed + self.turning)

    def columns(self, blocks: np.ndarray) -> np.ndarray:
        """Table columns of blocks."""
        if self.fixed is None:
            return blocks
        if not self.fixed:
            return blocks % max(1, self.turning)
        return np.where(
            blocks < self.fixed, blocks, self.fixed + (blocks - self.fixed) % max(1, self.turning)
        )

    def column(self, block: int) -> int:
        """Table column of a block."""
        fixed = self.fixed
        return (
            block
            if fixed is None or block < fixed
            else fixed + (block - fixed) % max(1, self.turning)
        )

    def reads_fresh(self, start: int, stop: int) -> bool:
        """Must tokens ``[start, stop)`` be attended to before they are stored? Not while they and
        their past fit the ring.
        """
        if self.fixed is None:
            return False
        law = self.group.law
        if law.reads_before_writing:
            return True
        oldest = max(min(law.first(start), start), law.prefix or 0) if start else 0
        return (
            ceil_div(stop, self.block_tokens) - min(oldest, start) // self.block_tokens
            > self.turning
        )

    def refills(self, start: int, stop: int) -> range:
        """Blocks that fresh tokens ``[start, stop)`` enter besides what is needed: the ring's last,
        if computed whole.

        A full ring is steady, and its pages are charged for anyway. Not of laws that hand pages
        back.
        """
        behind = ceil_div(stop, self.block_tokens)
        first = max(behind - self.turning, self.fixed or 0, ceil_div(start, self.block_tokens))
        return range(first, behind) if self.group.law.next_release(0) is None else range(0)

    def reaches_back(self, unit: int) -> bool:
        """Does a ring that has turned for less than ``unit`` tokens since a multiple of it still
        have all it needed there?

        It does where no block begins inside a unit, and nothing is handed back there.
        """
        return _reaches_back(self.group.law, self.block_tokens, unit)


def _reaches_back(law: Law, block_tokens: int, unit: int) -> bool:
    return block_tokens % unit == 0 and (law.next_release(0) is None or law.alignment % unit == 0)


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything the cache manager, the planner and the runner must agree on."""

    groups: tuple[GroupLayout, ...]
    arena: ArenaLayout
    hash_unit: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a device's kernels want of a block.

    growing_tokens, growing_head_bytes: blocks of unbounded groups hold this many tokens, or fewer
        where one head of every field already lies this many bytes together.
    bounded_tokens: no block of a bounded group is larger. kernel_tokens: smaller ones than this
        cost ``small_penalty`` of the ring's bytes for every time they fit into it, beyond the
        first.
    least_tokens: blocks of unbounded groups are no smaller while the arena is large; for small
        arenas blocks shrink to this before groups are split.
    """

    name: str
    growing_tokens: int
    growing_head_bytes: int
    bounded_tokens: int
    kernel_tokens: int
    least_tokens: int
    small_penalty: float


CPU = Profile(
    name="cpu",
    growing_tokens=128,
    growing_head_bytes=32 * 1024,
    bounded_tokens=64,
    kernel_tokens=64,
    least_tokens=16,
    small_penalty=0.1,
)
# A GPU's kernels gather entries wherever they lie, so small blocks cost them little beyond longer
# tables.
GPU = Profile(
    name="gpu",
    growing_tokens=32,
    growing_head_bytes=8 * 1024,
    bounded_tokens=64,
    kernel_tokens=16,
    least_tokens=16,
    small_penalty=0.008,
)
PROFILES: Mapping[str, Profile] = MappingProxyType(
    {profile.name: profile for profile in (CPU, GPU)}
)
"""Profiles by torch's name of the device type, ``gpu`` standing for all accelerators."""


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A group and its block size. ``smaller``: sizes it may still shrink to, ascending; ``told``:
    not ours to change.
    """

    group: Group
    block_tokens: int
    smaller: tuple[int, ...] = ()
    told: bool = False

    @property
    def page_bytes(self) -> int:
        return self.group.page_format(self.block_tokens).page_bytes


def solve_layout(
    groups: Sequence[Group],
    *,
    arena_bytes: int,
    profile: Profile,
    hash_unit: int,
    max_model_len: int,
    block_tokens: Mapping[int, int] | None = None,
) -> CacheLayout:
    """Choose a block size for every group, split groups whose pages are too large, and cut the
    arena.

    block_tokens: block sizes by index into ``groups``; such a group is neither shrunk nor split.
    The result's groups stand in the order given, parts of a group next to each other. Raises
    ConfigError for a block size that cuts an entry or does not nest with the hash unit,
    CapacityError where the arena cannot hold one slab per page size.
    """
    if not groups:
        raise ConfigError("groups is empty: a model without any cache needs no layout")
    if hash_unit < 1 or max_model_len < 1:
        raise ConfigError(
            f"hash_unit {hash_unit} and max_model_len {max_model_len} must be at least 1"
        )
    told = dict(block_tokens or {})
    if unknown := sorted(set(told) - set(range(len(groups)))):
        raise ConfigError(
            f"block_tokens names groups {unknown}; there are groups 0 to {len(groups) - 1}"
        )
    choices = [
        (
            _told(group, told[index], hash_unit)
            if index in told
            else _choose(group, profile, hash_unit, max_model_len)
        )
        for index, group in enumerate(groups)
    ]
    limit = arena_bytes // (PAGES_PER_GROUP * len(groups))
    choices = [part for choice in choices for part in _squeeze(choice, limit, profile.least_tokens)]
    arena, buckets = solve_arena([choice.page_bytes for choice in choices], arena_bytes)
    return CacheLayout(
        groups=tuple(
            _group_layout(c, b, arena, max_model_len) for c, b in zip(choices, buckets, strict=True)
        ),
        arena=arena,
        hash_unit=hash_unit,
        max_model_len=max_model_len,
    )


def nests(block_tokens: int, hash_unit: int) -> bool:
    """Whether a block is whole hash units, or a hash unit whole blocks."""
    return block_tokens % hash_unit == 0 or hash_unit % block_tokens == 0


def _group_layout(
    choice: _Choice, bucket: int, arena: ArenaLayout, max_model_len: int
) -> GroupLayout:
    blocks = ceil_div(max_model_len, choice.block_tokens)
    fixed, turning = choice.group.table_columns(choice.block_tokens)
    if fixed is not None:
        # One column at least behind the fixed ones: column arithmetic divides by it.
        fixed = min(fixed, blocks)
        turning = min(turning, max(1, blocks - fixed))
    return GroupLayout(
        group=choice.group,
        format=choice.group.page_format(choice.block_tokens),
        bucket=bucket,
        page_units=arena.page_units[bucket],
        fixed=fixed,
        turning=turning,
    )


def _told(group: Group, block_tokens: int, hash_unit: int) -> _Choice:
    group.page_format(block_tokens)
    if not nests(block_tokens, hash_unit):
        raise ConfigError(
            f"block_tokens {block_tokens} and hash_unit {hash_unit}: one must be a multiple of the"
            " other"
        )
    return _Choice(group=group, block_tokens=block_tokens, told=True)


def _choose(group: Group, profile: Profile, hash_unit: int, max_model_len: int) -> _Choice:
    """The block size that the profile wants, whatever the arena."""
    law = group.law
    if law.prefix is not None and law.span == 1 and group.stride == 1:
        return _Choice(group=group, block_tokens=1)
    if law.prefix is None:
        sizes = _candidates(group.stride, hash_unit, min(max_model_len, profile.growing_tokens))
        large = [size for size in sizes if size >= profile.least_tokens]
        best = next(
            (size for size in large if _head_bytes(group, size) >= profile.growing_head_bytes),
            sizes[-1],
        )
    else:
        sizes = _candidates(
            group.stride, hash_unit, min(max_model_len, law.span, profile.bounded_tokens)
        )
        best = min(sizes, key=lambda size: (_ring_cost(group, size, profile, hash_unit), -size))
    return _Choice(
        group=group, block_tokens=best, smaller=tuple(size for size in sizes if size < best)
    )


def _candidates(stride: int, hash_unit: int, most: int) -> list[int]:
    """Block sizes up to ``most`` that hold whole entries and nest with the hash unit, ascending;
    the least one if none is.

    Those are powers of two times the stride, or times the least common multiple of stride and unit
    where the unit is odd.
    """
    sizes = set()
    for base in (stride, lcm(stride, hash_unit)):
        size = base
        while size <= most:
            if nests(size, hash_unit):
                sizes.add(size)
            size *= 2
    return sorted(sizes) or [stride if nests(stride, hash_unit) else lcm(stride, hash_unit)]


def _head_bytes(group: Group, block_tokens: int) -> int:
    """Bytes that lie together for one head, in the field where that is least."""
    return min(
        block_tokens
        // member.stream.stride
        * (fld.entry_bytes // (fld.shape[0] if fld.shard == "heads" else 1))
        for member in group.members
        for fld in member.stream.fields
    )


def _ring_cost(group: Group, block_tokens: int, profile: Profile, hash_unit: int) -> float:
    """Bytes one request keeps of a bounded group, times what kernels lose to small blocks.

    A ring that does not reach back to the last whole hash unit is there twice while its request
    decodes: what resuming needs is kept beside it, and its pages change with every unit.
    """
    fixed, turning = group.table_columns(block_tokens)
    assert fixed is not None
    ring = (fixed + turning) * group.page_format(block_tokens).page_bytes
    if not _reaches_back(group.law, block_tokens, hash_unit):
        ring *= 2
    return ring * (1 + profile.small_penalty * max(0, profile.kernel_tokens / block_tokens - 1))


def _squeeze(choice: _Choice, limit: int, least_tokens: int) -> list[_Choice]:
    """Make pages no larger than ``limit`` bytes, as far as possible.

    Blocks shrink to ``least_tokens``, which kernels still bear; then the group is split by layers;
    then blocks shrink further.
    """
    if choice.told:
        return [choice]
    choice = _shrink(choice, limit, least_tokens)
    layers = len(choice.group.layers)
    for parts in range(1, layers + 1):
        split = [replace(choice, group=group) for group in choice.group.split(parts)]
        if max(part.page_bytes for part in split) <= limit:
            break
    block_tokens = min(_shrink(part, limit, 1).block_tokens for part in split)
    return [replace(part, block_tokens=block_tokens) for part in split]


def _shrink(choice: _Choice, limit: int, least_tokens: int) -> _Choice:
    while choice.page_bytes > limit and choice.smaller and choice.smaller[-1] >= least_tokens:
        choice = replace(choice, block_tokens=choice.smaller[-1], smaller=choice.smaller[:-1])
    return choice


def request_pages(layout: CacheLayout, n: int) -> tuple[int, ...]:
    """``most_pages`` of every group: what admission charges for a request of ``n`` tokens."""
    return tuple(group.most_pages(n) for group in layout.groups)


def lone_pages(layout: CacheLayout, n: int) -> tuple[int, ...]:
    """Pages of every group that must be there for a request of ``n`` tokens to be accepted at all.

    One more per group than it holds, for a shared block being copied.
    """
    return tuple(count + 1 for count in request_pages(layout, n))


def pages_by_bucket(layout: CacheLayout, pages_per_group: Sequence[int]) -> list[int]:
    """Pages per group summed up by page-size bucket, as the pool counts them."""
    pages = [0] * len(layout.arena.page_units)
    for group, count in zip(layout.groups, pages_per_group, strict=True):
        pages[group.bucket] += count
    return pages


def slabs_needed(layout: CacheLayout, pages_per_group: Sequence[int]) -> int:
    """Slabs that pages per group take; they fit together if and only if that is no more than the
    arena has.
    """
    return layout.arena.slabs_for(pages_by_bucket(layout, pages_per_group))


def longest_request(layout: CacheLayout, most: int) -> int:
    """Tokens of the longest request, up to ``most``, that an otherwise empty arena holds; 0 where
    it holds none.
    """
    # A longer request needs no fewer pages of any group.
    return bisect_right(
        range(1, most + 1),
        layout.arena.num_slabs,
        key=lambda n: slabs_needed(layout, lone_pages(layout, n)),
    )


def request_bytes(layout: CacheLayout, n: int) -> int:
    """Arena bytes of ``request_pages``, rounding to units and buckets included."""
    pages = pages_by_bucket(layout, request_pages(layout, n))
    return (
        sum(count * units for count, units in zip(pages, layout.arena.page_units, strict=True))
        * layout.arena.unit_bytes
    )


def slope_bytes(layout: CacheLayout) -> float:
    """Bytes of entries that every further token adds for ever: entry bytes by stride, over all
    growing streams.
    """
    return sum(
        size / stride for (law, stride), size in _sizes(layout).items() if law.prefix is None
    )


def bound_bytes(layout: CacheLayout, n: int | None = None) -> int:
    """Bytes of bounded streams' entries, each at its own most while ``n`` tokens are computed;
    without ``n``, ever.
    """
    total = 0
    for (law, stride), size in _sizes(layout).items():
        if law.prefix is not None:
            most = resident_tokens(law)
            total += (most if n is None else min(n, most)) // stride * size
    return total


def resident_tokens(law: Law) -> int:
    """Most tokens in ``needs(n)`` of a bounded law. The span counts token n, there only if it
    replaces what it reads.
    """
    assert law.prefix is not None
    return law.prefix + law.span - (0 if law.reads_before_writing else 1)


def ideal_bytes(layout: CacheLayout, n: int) -> int:
    """Bytes of entries that one request of ``n`` tokens must keep at its worst moment: the largest
    ``bytes_needed(m)``, m <= n.

    No m below one at which what grows, with all that is bounded at its bound, would not exceed the
    best found can be better: the search from n downwards ends there, mostly at once, and after one
    chunk for chunked laws.
    """
    sizes, bound, best = _sizes(layout), bound_bytes(layout, n), 0
    for stop in range(n, -1, -_SEARCH):
        lengths = np.arange(max(0, stop - _SEARCH + 1), stop + 1)
        grown, kept = np.zeros_like(lengths), np.zeros_like(lengths)
        for (law, stride), size in sizes.items():
            entries = law_entries(law, stride, lengths) * size
            if law.prefix is None:
                grown += entries
            else:
                kept += entries
        best = max(best, int((grown + kept).max()))
        if int(grown[0]) + bound <= best:
            break
    return best


def _sizes(layout: CacheLayout) -> dict[tuple[Law, int], int]:
    """Bytes of one entry of all streams with a law and a stride."""
    sizes: dict[tuple[Law, int], int] = {}
    for stream in (member.stream for group in layout.groups for member in group.group.members):
        sizes[stream.law, stream.stride] = (
            sizes.get((stream.law, stream.stride), 0) + stream.entry_bytes
        )
    return sizes


def law_entries(law: Law, stride: int, n: np.ndarray) -> np.ndarray:
    """Entries in ``needs(n)`` of a stream for an array of ``n``, each interval cut to whole entries
    as by ``Stream.needs``.
    """
    front = n if law.prefix is None else np.minimum(law.prefix, n)
    start = np.maximum(law.first(n), 0)
    joined = start <= front
    start = np.where(joined & (front > 0), 0, start)
    behind = np.maximum(0, n // stride * stride - start) // stride
    return behind + np.where(joined, 0, front // stride)
