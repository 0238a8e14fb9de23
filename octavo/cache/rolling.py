"""The checkpoint that decoding leaves behind.

Owns ``RollingCheckpoints``: for every row the pages that resuming at its last whole hash unit
needs, of the groups whose rings do not reach back that far by themselves. The index claims them
when the row ends. Until then they are *kept*: used like what the index has, referred to by no
request, so that they are charged to nobody and give way to whatever needs room.

Knows rings, laws and the pool; decides neither when a row rolls nor what is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.tables import Rings
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap


@dataclass(frozen=True, kw_only=True, eq=False)
class Trades:
    """Where a ring's page became the checkpoint, while the checkpoint's page became the ring's:
    token n is written there, and read from where it was.

    done: bool, of the rows that rolled. pages: the ring's page before, of those.
    """

    ring: int
    done: np.ndarray
    pages: np.ndarray


class RollingCheckpoints:
    """Of the rings ``rolling``, for ``rows`` rows.

    kept: int32 [rows, all columns of all rings], pages. kept_at: the tokens [rows] after which they
    allow to resume, 0 where nothing is kept.
    """

    def __init__(self, rings: Rings, pool: PagePool, *, rolling: Sequence[int]) -> None:
        self._rings, self._pool, self.rolling = rings, pool, tuple(rolling)
        self.kept = np.full_like(rings.table, NO_PAGE)
        self.kept_at = np.zeros(len(rings.table), np.int64)
        self._columns = np.flatnonzero(np.isin(rings.ring_of, self.rolling))
        self._ring_of = rings.ring_of[self._columns]
        self._laws = [rings.layouts[ring].group.law for ring in self.rolling]
        self._law_of = np.searchsorted(np.array(self.rolling, np.int64), self._ring_of)
        self._prefix = np.array([law.prefix or 0 for law in self._laws], np.int64)
        self._block = rings.block[self._ring_of]
        # Rings of one page that is read and then written: they can trade it.
        self._trading = tuple(
            ring
            for ring in self.rolling
            if rings.layouts[ring].group.law.reads_before_writing
            and rings.slices[ring].stop - rings.slices[ring].start == 1
        )

    # -- questions ---------------------------------------------------------------------------------

    def pages(self, row: int, ring: int, blocks: np.ndarray) -> np.ndarray:
        """The pages of blocks of a ring that are all kept."""
        columns = self._rings.slices[ring]
        return self.kept[row, columns][self._rings.layouts[ring].columns(blocks)]

    def all_pages(self) -> np.ndarray:
        """Every page that is kept, once for every use."""
        return self.kept[self.kept != NO_PAGE]

    def idle_row(self) -> int | None:
        """The first row that keeps a page no request uses, None where there is none."""
        for row in np.flatnonzero(self.kept_at).tolist():
            pages = self.kept[row]
            if (self._pool.references(pages[pages != NO_PAGE]) == 0).any():
                return row
        return None

    # -- transitions -------------------------------------------------------------------------------

    def roll(self, rows: np.ndarray, n: np.ndarray, step: int) -> list[Trades]:
        """Keep what resuming at ``n`` [R] tokens needs, in place of what was kept. The token ``n``
        comes next.

        Rings of one page trade it where they can, which is that token's turn as well; ``step``
        takes the reference on the page that it reads over. The other rings must turn behind this,
        whatever their schedule says.
        """
        self.kept_at[rows] = n
        trades = [self._trade(ring, rows, step) for ring in self._trading]
        traded = np.zeros((len(rows), len(self._rings.layouts)), bool)
        for trade in trades:
            traded[:, trade.ring] = trade.done
        left = np.flatnonzero((~traded[:, self.rolling]).any(axis=1))
        if len(left):
            self._keep(rows[left], n[left], traded[left])
        assert (self.kept_at[rows] == n).all()
        return trades

    def _trade(self, ring: int, rows: np.ndarray, step: int) -> Trades:
        """Trade where the kept page is nobody else's."""
        column = self._rings.slices[ring].start
        table, kept = self._rings.table[:, column], self.kept[:, column]
        done = (kept[rows] != NO_PAGE) & (table[rows] != NO_PAGE)
        able = done.nonzero()[0]
        if len(able):
            done[able] = self._pool.trade(kept[rows[able]], table[rows[able]], step)
        rows = rows[done]
        pages = table[rows]
        table[rows], kept[rows] = kept[rows], pages
        self._rings.owned[rows, column] = True
        assert (table[rows] != pages).all(), "a token is not written where its past is read"
        return Trades(ring=ring, done=done, pages=pages)

    def _keep(self, rows: np.ndarray, n: np.ndarray, traded: np.ndarray) -> None:
        """Keep the pages that the rings have, but for those ``traded`` (bool [R, rings])."""
        at = rows[:, None]
        kept, pages = self.kept[at, self._columns], self._wanted(rows, n)
        pages = np.where(traded[:, self._ring_of], kept, pages)
        changed = pages != kept
        self.kept[at, self._columns] = pages
        self._pool.keep(pages[changed & (pages != NO_PAGE)])
        self._pool.drop(kept[changed & (kept != NO_PAGE)])

    def _wanted(self, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Pages [R, rolling columns] that resuming at ``n`` needs, NO_PAGE in all other columns."""
        blocks = self._rings.blocks_at(n, self._columns)
        first = np.empty((len(n), len(self.rolling)), np.int64)
        for at, law in enumerate(self._laws):
            first[:, at] = law.first(n)
        start, size = blocks * self._block, self._block
        wanted = (start + size > first[:, self._law_of]) & (start < n[:, None])
        if self._prefix.any():
            wanted |= start < np.minimum(self._prefix[self._law_of], n[:, None])
        return np.where(wanted, self._rings.table[rows[:, None], self._columns], NO_PAGE)

    def forget(self, row: int) -> None:
        """Keep nothing for a row any longer."""
        if self.kept_at[row]:
            pages = self.kept[row]
            self._pool.drop(pages[pages != NO_PAGE])
            self.kept[row], self.kept_at[row] = NO_PAGE, 0
        assert (self.kept[row] == NO_PAGE).all()

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.kept)

    def check(self, row: int, n: int) -> None:
        """Assert what must hold of a row of ``n`` planned tokens: all that resuming needs is
        there.
        """
        mark = int(self.kept_at[row])
        assert self.kept.shape == self._rings.table.shape and len(self.kept_at) == len(self.kept)
        assert 0 <= mark <= n, "a checkpoint lies behind"
        kept = 0
        for ring in self.rolling if mark else ():
            layout = self._rings.layouts[ring]
            needed = [
                block
                for start, stop in layout.group.law.needs(mark)
                for block in range(start // layout.block_tokens, -(-stop // layout.block_tokens))
            ]
            pages = self.pages(row, ring, np.array(sorted(set(needed)), np.int64))
            assert (pages != NO_PAGE).all(), "what resuming needs is kept"
            kept += len(pages)
        # The block in which the checkpoint lies is kept even where none of its rows is needed.
        assert np.count_nonzero(self.kept[row] != NO_PAGE) <= kept + len(self.rolling) * bool(mark)
