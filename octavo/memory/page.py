"""What there is to say about pages: states, counts, moves. Plain data.

Owns the records that ``PagePool`` returns. Knows bytes and pages only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PageState(IntEnum):
    """What a page is. FREE is 0, so that the first free page of a slab is its first minimum."""

    FREE = 0
    HELD = 1
    CACHED = 2
    LIMBO = 3


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Pages of one bucket by state. ``free`` counts pages in slabs that the bucket has, not in free
    slabs.
    """

    free: int
    cached: int
    held: int
    limbo: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """What ``compact`` decided: page ``sources[i]`` now lives at ``targets[i]``, ``units`` arena
    units each.
    """

    bucket: int
    sources: Pages
    targets: Pages
    units: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolSnapshot:
    """The pool for a viewer, read-only. ``slab_bucket`` changes as the pool does.

    slab_bucket: int32 [slabs], -1 where a slab is free. states: uint8 ``PageState`` [slabs, widest
    slab]; only the first ``pages_per_slab(bucket)`` of a row are pages.
    """

    slab_bucket: npt.NDArray[np.int32]
    states: npt.NDArray[np.uint8]
