"""What compaction did, as a rewriting of page numbers wherever they are written down.

Owns ``Remap``. Knows nothing of who writes pages down: pool, tables, index and spans apply it to
their own arrays.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Remap:
    """Rewrites moved pages in integer arrays, in place."""

    def __init__(self, sources: np.ndarray, targets: np.ndarray) -> None:
        order = np.argsort(sources)
        self._sources, self._targets = sources[order], targets[order]

    def apply(self, pages: np.ndarray) -> None:
        """Replace every source in ``pages`` (any shape) by its target."""
        # The sources lie near each other, in one slab: two comparisons leave few to be looked up.
        near = (pages >= self._sources[0]) & (pages <= self._sources[-1])
        found = pages[near]
        if not len(found):
            return
        at = np.searchsorted(self._sources, found)
        moved = self._sources[at] == found
        pages[near] = np.where(moved, self._targets[at], found)

    def apply_all(self, arrays: Iterable[np.ndarray]) -> None:
        """``apply`` to every array."""
        for pages in arrays:
            self.apply(pages)
