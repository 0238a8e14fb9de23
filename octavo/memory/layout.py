"""How an arena is cut: units, slabs and page-size buckets.

Owns ``ArenaLayout`` and the solver that picks it. Knows bytes only: no tokens, no groups, no kinds.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def scratch_unit(self) -> int:
        """First unit of the scratch page behind the slabs: padding may write there, nothing reads it."""
        return self.slab_units * self.num_slabs

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole buffer, scratch page included."""
        return (self.scratch_unit + max(self.page_units)) * self.unit_bytes
