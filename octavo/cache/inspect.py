"""What a cache looks like from outside: every slab and page, every group, what each request holds.

Owns ``inspect``, its snapshot, and ``count_pages`` and ``count_bytes`` for metrics. Only asks:
nothing here changes a cache. Knows no tensors, no clock and no JSON; snapshots are of plain
numbers, strings and tuples, so that ``json.dumps(snapshot, default=vars)`` is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.base import NO_PAGE, block_range
from octavo.cache.layout import CacheLayout, GroupLayout
from octavo.cache.manager import CachedRequest, KVCacheManager
from octavo.memory.page import Counts, PageState

MAX_PAGES = 20_000
"""Pages that a snapshot tells one by one; where more slabs are in use it gives counts per slab."""

STATE_CHARS = ".hcl"
"""One character per ``PageState``: free, held, cached, limbo."""

GROUP_CHARS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""One character per group, by its index."""

FREE_CHAR, UNKNOWN_CHAR = ".", "?"
"""Instead of a group: the page is free; it is in limbo and nobody refers to it any more."""

_UNKNOWN = -1
_STATES = len(PageState)

Owners = npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class ArenaSnapshot:
    """The buffer. Sizes in bytes; ``total_bytes`` has the scratch page behind the slabs too."""

    unit_bytes: int
    slab_bytes: int
    num_slabs: int
    free_slabs: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class BucketSnapshot:
    """One page size. ``free`` counts pages in slabs that the bucket has; ``slabs``: how many those
    are.
    """

    page_bytes: int
    pages_per_slab: int
    slabs: int
    free: int
    held: int
    cached: int
    limbo: int


@dataclass(frozen=True, kw_only=True)
class GroupSnapshot:
    """One group and its pages by state.

    page_bytes: what a page takes of the arena, rounding to units and bucket included. ring: most
        blocks of one request; None
    where blocks are never let go. fields: name, dtype and shape of one entry, each different one
    once.
    limbo: pages known to be the group's; in a bucket that groups share, pages in limbo may have
        nobody left who tells.
    """

    index: int
    law: str
    layers: tuple[int, ...]
    block_tokens: int
    page_bytes: int
    bucket: int
    ring: int | None
    fields: tuple[str, ...]
    held: int
    cached: int
    limbo: int


@dataclass(frozen=True, kw_only=True)
class SlabsSnapshot:
    """Every slab, in order of address; all lists have one item per slab.

    bucket: the page size a slab serves, None where it is on the free list.
    detail: ``pages`` or ``counts``; the other one's lists are empty.
    states, groups (``pages``): strings with one character per page, see ``STATE_CHARS``,
        ``GROUP_CHARS``, ``FREE_CHAR``, ``UNKNOWN_CHAR``; empty where the slab is free.
    counts (``counts``): [group, held, cached, limbo] of every group with pages in the slab; group
    None where unknown.
    """

    detail: str
    bucket: tuple[int | None, ...]
    states: tuple[str, ...]
    groups: tuple[str, ...]
    counts: tuple[tuple[tuple[int | None, int, int, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class HoldingSnapshot:
    """What one request holds of one group.

    blocks: in its table. pages, bytes: all it refers to, those of its chain and its checkpoints
        included; a page that several
    requests share counts for each. needs: ranges [first, end) of blocks that computing its next
    token reads.
    """

    group: int
    blocks: int
    pages: int
    bytes: int
    needs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class RequestSnapshot:
    """A request that has a row. tokens: known. computed: received. cached_tokens: found at its
    first admission.
    """

    request_id: str
    tokens: int
    computed: int
    cached_tokens: int
    groups: tuple[HoldingSnapshot, ...]


@dataclass(frozen=True, kw_only=True)
class IndexSnapshot:
    """The prefix index, counted in nodes of ``hash_unit`` tokens. ``evicted_nodes`` counts since
    the start.
    """

    hash_unit: int
    nodes: int
    resume_points: int
    ghosts: int
    evicted_nodes: int


@dataclass(frozen=True, kw_only=True)
class CacheSnapshot:
    """A cache at one moment. ``compactions`` (slabs emptied) and ``moved_pages`` count since the
    start.
    """

    arena: ArenaSnapshot
    buckets: tuple[BucketSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    slabs: SlabsSnapshot
    requests: tuple[RequestSnapshot, ...]
    index: IndexSnapshot
    compactions: int
    moved_pages: int


@dataclass(frozen=True, kw_only=True)
class PageCounts:
    """Counters for metrics. buckets: by bucket and state. groups: by group and state, ``free``
    always 0.

    free_slabs, and since the start: compactions (slabs emptied), moved_pages, evicted_nodes.
    """

    buckets: tuple[Counts, ...]
    groups: tuple[Counts, ...]
    free_slabs: int
    compactions: int
    moved_pages: int
    evicted_nodes: int


@dataclass(frozen=True, kw_only=True)
class ByteCounts:
    """Bytes of pages by state, of ``total`` bytes in slabs. What is not held, cached or in limbo is
    free, or lost to the tails of slabs.
    """

    held: int
    cached: int
    limbo: int
    total: int


def inspect(manager: KVCacheManager, *, max_pages: int = MAX_PAGES) -> CacheSnapshot:
    """Look at everything. To be called between steps, by whoever runs them; costs O(pages), and
    changes nothing.

    max_pages: more pages than this are told as counts per slab.
    """
    layout, coordinator = manager.layout, manager.coordinator
    arena, pool, index = layout.arena, coordinator.pool, coordinator.index
    owners, slab_bucket = _owners(manager), pool.snapshot().slab_bucket
    counts = _count_groups(manager, owners)
    slabs = np.bincount(slab_bucket + 1, minlength=len(arena.page_units) + 1)[1:].tolist()
    return CacheSnapshot(
        arena=ArenaSnapshot(
            unit_bytes=arena.unit_bytes,
            slab_bytes=arena.slab_units * arena.unit_bytes,
            num_slabs=arena.num_slabs,
            free_slabs=pool.free_slabs,
            total_bytes=arena.total_bytes,
        ),
        buckets=tuple(_bucket(layout, b, slabs[b], pool.counts(b)) for b in range(len(slabs))),
        groups=tuple(_group(layout, g, group, counts[g]) for g, group in enumerate(layout.groups)),
        slabs=_slabs(manager, owners, max_pages),
        requests=tuple(_request(manager, request) for request in manager.requests),
        index=IndexSnapshot(
            hash_unit=layout.hash_unit,
            nodes=len(index),
            resume_points=index.resume_points,
            ghosts=index.ghosts,
            evicted_nodes=index.evicted_nodes,
        ),
        compactions=coordinator.compactions,
        moved_pages=coordinator.moved_pages,
    )


def count_pages(manager: KVCacheManager) -> PageCounts:
    """What metrics ask often. O(buckets and groups) unless groups share a bucket: then O(pages), as
    ``inspect`` is.
    """
    coordinator = manager.coordinator
    shared = any(len(tenants) > 1 for tenants in _tenants(manager.layout))
    return PageCounts(
        buckets=tuple(
            coordinator.pool.counts(bucket)
            for bucket in range(len(manager.layout.arena.page_units))
        ),
        groups=_count_groups(manager, _owners(manager) if shared else None),
        free_slabs=coordinator.pool.free_slabs,
        compactions=coordinator.compactions,
        moved_pages=coordinator.moved_pages,
        evicted_nodes=coordinator.index.evicted_nodes,
    )


def count_bytes(manager: KVCacheManager) -> ByteCounts:
    """How full a cache is. O(buckets)."""
    arena, pool = manager.layout.arena, manager.coordinator.pool
    counts = [pool.counts(bucket) for bucket in range(len(arena.page_units))]
    sizes = [units * arena.unit_bytes for units in arena.page_units]
    pairs = list(zip(counts, sizes, strict=True))
    return ByteCounts(
        held=sum(count.held * size for count, size in pairs),
        cached=sum(count.cached * size for count, size in pairs),
        limbo=sum(count.limbo * size for count, size in pairs),
        total=arena.num_slabs * arena.slab_units * arena.unit_bytes,
    )


def _tenants(layout: CacheLayout) -> list[list[int]]:
    """Groups of every bucket."""
    return [
        [index for index, group in enumerate(layout.groups) if group.bucket == bucket]
        for bucket in range(len(layout.arena.page_units))
    ]


def _owners(manager: KVCacheManager) -> Owners:
    """Group of every page, int16 [slabs, widest slab]; ``_UNKNOWN`` where it is free, or in limbo
    and forgotten.

    The pool knows no groups. A bucket with one group tells; in the others rows and index say which
    pages are whose.
    """
    arena, pool = manager.layout.arena, manager.coordinator.pool.snapshot()
    tenants = _tenants(manager.layout)
    only = np.array(
        [groups[0] if len(groups) == 1 else _UNKNOWN for groups in tenants] + [_UNKNOWN], np.int16
    )
    owners = np.where(
        pool.states == PageState.FREE, np.int16(_UNKNOWN), only[pool.slab_bucket][:, None]
    )
    shared = [index for groups in tenants if len(groups) > 1 for index in groups]
    for index, pages in zip(shared, _referred(manager, shared), strict=True):
        slab, rest = np.divmod(pages, arena.slab_units)
        owners[slab, rest // manager.layout.groups[index].page_units] = index
    return owners


def _referred(manager: KVCacheManager, groups: Sequence[int]) -> list[npt.NDArray[np.int32]]:
    """For every group, pages that rows, their rolling checkpoints and the index refer to; may
    repeat.
    """
    if not groups:
        return []
    coordinator = manager.coordinator
    held = [coordinator.held_pages(manager.row(request)) for request in manager.requests]
    found = []
    for group in groups:
        lanes = coordinator.grains[group].lanes
        indexed = coordinator.index.pages[lanes.start : lanes.stop]
        known = [indexed[indexed != NO_PAGE]]
        if group in coordinator.rolling_groups:
            rolling = np.flatnonzero(coordinator.rolling.kept_at).tolist()
            known += [coordinator.kept_pages(row, group)[1] for row in rolling]
        found.append(np.concatenate([*known, *(row[group] for row in held)]))
    return found


def _count_groups(manager: KVCacheManager, owners: Owners | None) -> tuple[Counts, ...]:
    """Pages of every group by state. owners may be None where every bucket has one group."""
    layout, pool = manager.layout, manager.coordinator.pool
    if owners is None:
        counts = [pool.counts(group.bucket) for group in layout.groups]
        table = [[0, one.held, one.cached, one.limbo] for one in counts]
    else:
        known = owners != _UNKNOWN
        codes = owners[known].astype(np.int64) * _STATES + pool.snapshot().states[known]
        table = (
            np.bincount(codes, minlength=len(layout.groups) * _STATES).reshape(-1, _STATES).tolist()
        )
    return tuple(
        Counts(free=0, held=held, cached=cached, limbo=limbo) for _, held, cached, limbo in table
    )


def _bucket(layout: CacheLayout, bucket: int, slabs: int, counts: Counts) -> BucketSnapshot:
    return BucketSnapshot(
        page_bytes=layout.arena.page_units[bucket] * layout.arena.unit_bytes,
        pages_per_slab=layout.arena.pages_per_slab(bucket),
        slabs=slabs,
        free=counts.free,
        held=counts.held,
        cached=counts.cached,
        limbo=counts.limbo,
    )


def _group(layout: CacheLayout, index: int, group: GroupLayout, counts: Counts) -> GroupSnapshot:
    fields = (field for member in group.group.members for field in member.stream.fields)
    described = dict.fromkeys(f"{field.name} {field.dtype} {list(field.shape)}" for field in fields)
    return GroupSnapshot(
        index=index,
        law=group.group.law.describe(),
        layers=group.group.layers,
        block_tokens=group.block_tokens,
        page_bytes=group.page_units * layout.arena.unit_bytes,
        bucket=group.bucket,
        ring=None if group.fixed is None else group.fixed + group.turning,
        fields=tuple(described),
        held=counts.held,
        cached=counts.cached,
        limbo=counts.limbo,
    )


def _request(manager: KVCacheManager, request: CachedRequest) -> RequestSnapshot:
    row, computed, holdings = manager.row(request), manager.computed(request), []
    pages = manager.coordinator.held_pages(row)
    for index, group in enumerate(manager.coordinator.groups):
        needs = (
            block_range(interval, group.layout.block_tokens)
            for interval in group.law.needs(computed)
        )
        holdings.append(
            HoldingSnapshot(
                group=index,
                blocks=int(group.num_blocks(np.array([row]))[0]),
                pages=len(pages[index]),
                bytes=len(pages[index]) * group.layout.page_units * manager.layout.arena.unit_bytes,
                needs=tuple((blocks.start, blocks.stop) for blocks in needs if blocks),
            )
        )
    return RequestSnapshot(
        request_id=request.request_id,
        tokens=request.num_tokens,
        computed=computed,
        cached_tokens=request.num_cached_tokens,
        groups=tuple(holdings),
    )


def _slabs(manager: KVCacheManager, owners: Owners, max_pages: int) -> SlabsSnapshot:
    layout, pool = manager.layout, manager.coordinator.pool.snapshot()
    per_slab = np.array(
        [layout.arena.pages_per_slab(b) for b in range(len(layout.arena.page_units))] + [0]
    )
    sizes = per_slab[pool.slab_bucket]
    bucket = tuple(None if b < 0 else b for b in pool.slab_bucket.tolist())
    if sizes.sum() > max_pages or len(layout.groups) > len(GROUP_CHARS):
        counts = _slab_counts(owners, pool.states, len(layout.groups))
        return SlabsSnapshot(detail="counts", bucket=bucket, states=(), groups=(), counts=counts)
    marks = np.frombuffer((GROUP_CHARS[: len(layout.groups)] + UNKNOWN_CHAR).encode(), np.uint8)[
        owners
    ]
    marks = np.where(pool.states == PageState.FREE, np.uint8(ord(FREE_CHAR)), marks)
    states = np.frombuffer(STATE_CHARS.encode(), np.uint8)[pool.states]
    return SlabsSnapshot(
        detail="pages",
        bucket=bucket,
        states=_strings(states, sizes),
        groups=_strings(marks, sizes),
        counts=(),
    )


def _strings(chars: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Rows of characters as strings, each cut to its size."""
    text, width = chars.tobytes().decode(), chars.shape[1]
    return tuple(text[row * width : row * width + size] for row, size in enumerate(sizes.tolist()))


def _slab_counts(
    owners: Owners, states: npt.NDArray[np.uint8], groups: int
) -> tuple[tuple[tuple[int | None, int, int, int], ...], ...]:
    """Of every slab, pages by group (None: unknown) and state, free pages and absent groups left
    out.
    """
    slabs = len(states)
    codes = (np.arange(slabs)[:, None] * (groups + 1) + owners + 1) * _STATES + states
    table = np.bincount(codes.reshape(-1), minlength=slabs * (groups + 1) * _STATES).reshape(
        slabs, groups + 1, _STATES
    )
    found: list[list[tuple[int | None, int, int, int]]] = [[] for _ in range(slabs)]
    there = np.argwhere(table[:, :, 1:].any(axis=2))
    for (slab, owner), (_, held, cached, limbo) in zip(
        there.tolist(), table[tuple(there.T)].tolist(), strict=True
    ):
        found[slab].append((owner - 1 if owner else None, held, cached, limbo))
    return tuple(map(tuple, found))
