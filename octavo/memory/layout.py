"""How an arena is cut: units, slabs and page-size buckets.

Owns ``ArenaLayout`` and the solver that picks it. Knows bytes only: no tokens, no groups, no kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import CapacityError, ConfigError, ceil_div

MAX_SLABS = 8192
"""More slabs make every allocation slower, and save nothing: half a slab per bucket is by then
0.006 % of the arena.
"""

MERGE_LIMIT = 0.01
"""Page sizes share a bucket while rounding up costs a page less than this part of itself."""

_CANDIDATES = 4096
_MAX_UNITS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ArenaLayout:
    """An arena of ``num_slabs`` equal slabs. A slab in use serves pages of one bucket.

    unit_bytes: granule of addresses; a page is named by its first unit (int32).
    page_units: page size of every bucket, in units.
    """

    unit_bytes: int
    slab_units: int
    num_slabs: int
    page_units: tuple[int, ...]

    def pages_per_slab(self, bucket: int) -> int:
        """Pages of a bucket that one slab holds."""
        return self.slab_units // self.page_units[bucket]

    def slabs_for(self, pages: Sequence[int]) -> int:
        """Slabs that ``pages[bucket]`` pages of every bucket take once they are moved together."""
        return sum(
            ceil_div(count, self.pages_per_slab(bucket)) for bucket, count in enumerate(pages)
        )

    @property
    def scratch_unit(self) -> int:
        """First unit of the scratch page behind the slabs: padding may write there, nothing reads
        it.
        """
        return self.slab_units * self.num_slabs

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole buffer, scratch page included."""
        return (self.scratch_unit + max(self.page_units)) * self.unit_bytes


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Bytes of an arena that hold nothing, and why.

    arena_tail: bytes behind the last slab, too few for another.
    slab_tails: per bucket, bytes at the end of *each* slab of it, too few for another page.
    open_slabs: per bucket, bytes expected free in the slab being filled: half a slab, less the page
        being filled; no compaction gets these back, and no bucket that is in use escapes them.
    scratch: bytes of the scratch page behind the slabs.
    """

    arena_tail: int
    slab_tails: tuple[int, ...]
    open_slabs: tuple[int, ...]
    scratch: int


def solve_arena(
    page_bytes: Sequence[int], arena_bytes: int, *, unit_bytes: int = 256
) -> tuple[ArenaLayout, tuple[int, ...]]:
    """Cut ``arena_bytes`` for pages of these sizes. Returns the layout and the bucket of every
    given size.

    The slabs together never exceed ``arena_bytes``; the scratch page lies behind them. Sizes are
    rounded up to units, and near-equal ones share a bucket. Raises CapacityError where the arena
    cannot hold one slab per bucket.
    """
    if not page_bytes or min(page_bytes) < 1 or unit_bytes < 1:
        raise ConfigError(
            f"page sizes {tuple(page_bytes)} and unit_bytes {unit_bytes} must all be at least 1"
        )
    wanted = [ceil_div(size, unit_bytes) for size in page_bytes]
    page_units = _buckets(wanted)
    arena_units = arena_bytes // unit_bytes
    if arena_units + page_units[0] > _MAX_UNITS:
        raise ConfigError(
            f"unit_bytes {unit_bytes} is too small for {arena_bytes} bytes: addresses are int32"
        )
    slab_units = _slab_units(page_units, arena_units, unit_bytes)
    layout = ArenaLayout(
        unit_bytes=unit_bytes,
        slab_units=slab_units,
        num_slabs=arena_units // slab_units,
        page_units=page_units,
    )
    return layout, tuple(
        max(b for b, units in enumerate(page_units) if units >= want) for want in wanted
    )


def waste(layout: ArenaLayout, *, arena_bytes: int | None = None) -> Waste:
    """Where a layout loses bytes. Without ``arena_bytes`` the arena is taken to end with its last
    slab.
    """
    tails = [layout.slab_units % units for units in layout.page_units]
    slack = [
        max(0, layout.pages_per_slab(bucket) - 1) * units // 2
        for bucket, units in enumerate(layout.page_units)
    ]
    slabs = layout.scratch_unit * layout.unit_bytes
    return Waste(
        arena_tail=0 if arena_bytes is None else arena_bytes - slabs,
        slab_tails=tuple(tail * layout.unit_bytes for tail in tails),
        open_slabs=tuple(units * layout.unit_bytes for units in slack),
        scratch=layout.total_bytes - slabs,
    )


def _buckets(wanted: Sequence[int]) -> tuple[int, ...]:
    """Page sizes of the buckets, descending: a size joins the next larger bucket where that costs
    it little.
    """
    sizes: list[int] = []
    for units in sorted(set(wanted), reverse=True):
        if not sizes or (sizes[-1] - units) >= MERGE_LIMIT * units:
            sizes.append(units)
    return tuple(sizes)


def _slab_units(page_units: tuple[int, ...], arena_units: int, unit_bytes: int) -> int:
    """The multiple of the largest page that is expected to lose least of the arena.

    Lost are: what is left of the arena behind the last slab, the tail of every slab (all buckets
    taken to have equally many), and half a slab per bucket, which is the one being filled. With one
    bucket the half slab is free for use by the next
    allocation, but counts all the same: fewer bytes per slab would only mean more slabs, which
    ``MAX_SLABS`` bounds.
    """
    largest, buckets = max(page_units), len(page_units)
    most = arena_units // (largest * buckets)
    if most < 1:
        raise CapacityError(
            f"an arena of {arena_units * unit_bytes} bytes cannot hold one slab for each of"
            f" {buckets} page sizes: {buckets} x {largest * unit_bytes} ="
            f" {buckets * largest * unit_bytes} bytes are the least"
        )
    least = min(most, ceil_div(arena_units, MAX_SLABS * largest))
    slab = largest * np.arange(least, min(most, least + _CANDIDATES) + 1, dtype=np.int64)
    tails = sum((slab % units for units in page_units), start=np.zeros_like(slab))
    lost = arena_units % slab + (arena_units // slab) * tails / buckets + buckets * slab / 2
    return int(slab[int(lost.argmin())])
