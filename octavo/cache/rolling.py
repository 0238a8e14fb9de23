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
    """Rows of one ring whose page became their checkpoint, while the checkpoint's page became the
    ring's: token n is written there, and read from where it was.

    pages: the rings' pages before, one for each row.
    """

    ring: int
    rows: np.ndarray
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

    def roll(self, rows: np.ndarray, n: np.ndarray) -> list[Trades]:
        """Keep what resuming at ``n`` [R] tokens needs, in place of what was kept. The token ``n``
        comes next.

        Rings of one page trade it where they can, which is that token's turn as well: its old page
        is to be released by the caller. The others must turn behind this, whatever their schedule
        says.
        """
        self.kept_at[rows] = n
        trades = [self._trade(ring, rows) for ring in self._trading]
        kept, pages = self.kept[np.ix_(rows, self._columns)], self._wanted(rows, n)
        for trade in trades:
            done = np.isin(rows, trade.rows)[:, None] & (self._ring_of == trade.ring)
            pages[done] = kept[done]
        self.kept[np.ix_(rows, self._columns)] = pages
        changed = pages != kept
        self._pool.keep(
            np.concatenate(
                [*(trade.pages for trade in trades), pages[changed & (pages != NO_PAGE)]]
            )
        )
        self._pool.drop(kept[changed & (kept != NO_PAGE)])
        assert (self.kept_at[rows] == n).all()
        return trades

    def _trade(self, ring: int, rows: np.ndarray) -> Trades:
        """Trade where the kept page is nobody else's. Its use becomes a reference, and the page of
        the ring is to be kept.
        """
        column = self._rings.slices[ring].start
        table, kept = self._rings.table[:, column], self.kept[:, column]
        able = (kept[rows] != NO_PAGE) & (table[rows] != NO_PAGE)
        able[able] = self._pool.reclaim(kept[rows[able]])
        rows = rows[able]
        pages = table[rows]
        table[rows], kept[rows] = kept[rows], pages
        self._rings.owned[rows, column] = True
        assert (table[rows] != kept[rows]).all()
        return Trades(ring=ring, rows=rows, pages=pages)

    def _wanted(self, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Pages [R, rolling columns] that resuming at ``n`` needs, NO_PAGE in all other columns."""
        rings, which, columns = self._rings, self._ring_of, self._columns
        block = rings.block[which]
        blocks = rings.blocks_at(n)[:, columns]
        first = np.zeros((len(n), len(rings.layouts)), np.int64)
        prefix = np.zeros_like(first)
        for ring in self.rolling:
            law = rings.layouts[ring].group.law
            first[:, ring] = np.maximum(law.first(n), 0) // rings.block[ring]
            prefix[:, ring] = np.minimum(law.prefix or 0, n)
        start = blocks * block
        wanted = (blocks >= first[:, which]) & (start < n[:, None]) | (start < prefix[:, which])
        return np.where(wanted, rings.table[np.ix_(rows, columns)], NO_PAGE)

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
