"""Which page holds which block of which request: one table per group.

Owns ``AppendTable``, for laws that grow: a column for every block; ``RingTable``, for laws that let
go: columns that blocks take in turns; and ``Rings``, all ring tables of a model side by side in one
array, so that decoding asks once for all of them. Which of the two a group gets follows from its
layout. Tables are what is true; what follows from them for speed is in ``schedule.py``.

Knows blocks, laws and the pool; knows no keys, no prefix index and no checkpoints' positions. It
never evicts: whoever carries a plan out has made the pool ready.

In a ring, block b has column ``fixed + (b - fixed) % turning``. Which block a column holds is not
written down: of the blocks of the first n tokens it is the last one with that column, if the column
has a page at all. That is so since a ring has as many columns as the law needs blocks at the worst
alignment: a block whose column was wanted again is not needed any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE, blocks_of, ceil_div
from octavo.cache.block_plan import NO_PAGES, Applied, BlockPlan, Promise, Span, blocks_in
from octavo.cache.group_step import copy_jobs
from octavo.cache.layout import GroupLayout
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap


class GroupTable(ABC):
    """The table of one group for a number of rows.

    table: int32 [rows, columns], pages. owned: bool alike: the row may write into that page; where
    it may not, it copies the block first.
    """

    table: np.ndarray
    owned: np.ndarray

    def __init__(self, layout: GroupLayout, pool: PagePool) -> None:
        self.layout, self.law, self._pool = layout, layout.group.law, pool
        self._block = layout.block_tokens

    # -- questions ---------------------------------------------------------------------------------

    def blocks_needed(self, n: int) -> np.ndarray:
        """Blocks that computing token ``n`` needs, ascending."""
        return blocks_in(self.law.needs(n), self._block)

    def held_pages(self, row: int) -> np.ndarray:
        """Pages of a row."""
        pages = self.table[row]
        return pages[pages != NO_PAGE]

    @abstractmethod
    def num_blocks(self, rows: np.ndarray) -> np.ndarray:
        """Blocks that rows hold."""

    @abstractmethod
    def missing(self, rows: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Pages that rows will still ask for on their way to ``pages`` blocks, that of a shared
        block to be copied included.
        """

    # -- transitions -------------------------------------------------------------------------------

    @abstractmethod
    def plan(
        self,
        row: int,
        start: int,
        stop: int,
        *,
        marks: Sequence[int] = (),
        write_from: int = 0,
        steady: bool = False,
    ) -> BlockPlan:
        """What tokens ``[start, stop)`` need, with checkpoints after ``marks`` tokens. Changes
        nothing.

        write_from: tokens before it are stored already, in shared pages.
        steady: every column of the row's ring is known to hold a page that nobody else uses.
        """

    @abstractmethod
    def apply(self, plan: BlockPlan) -> Applied:
        """Carry a plan out. The pool must be ready for ``plan.wanted`` pages."""

    @abstractmethod
    def adopt(self, row: int, blocks: np.ndarray, pages: np.ndarray, *, filled: int) -> None:
        """Begin a request on shared pages, already retained: it reads them, and copies a block
        before it writes into it.

        filled: tokens that the pages hold; where they end inside a block, that one will be copied.
        """

    @abstractmethod
    def fork(self, source: int, row: int, n: int) -> np.ndarray:
        """Begin a request on everything that ``source`` holds after ``n`` tokens; returns the
        pages, for the caller to retain.

        The source goes on writing into its last block; the new row copies that block before it
        does.
        """

    @abstractmethod
    def clear(self, row: int) -> np.ndarray:
        """Forget a row; returns every page it held, for the caller to release."""

    @abstractmethod
    def check(self, row: int, n: int) -> None:
        """Assert what must hold of a row of ``n`` planned tokens, from scratch."""


class AppendTable(GroupTable):
    """Of a law that never lets go: block b is in column b, and all blocks up to the last are there.

    first_size: columns to begin with; their number doubles when more are needed.
    """

    def __init__(
        self, layout: GroupLayout, pool: PagePool, *, rows: int, first_size: int = 16
    ) -> None:
        super().__init__(layout, pool)
        self.table = np.full((rows, first_size), NO_PAGE, np.int32)
        self.owned = np.zeros((rows, first_size), bool)
        # Blocks there are, and 1 where the last one is shared and will be copied.
        self.filled, self._to_copy = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def num_blocks(self, rows: np.ndarray) -> np.ndarray:
        return self.filled[rows]

    def held_pages(self, row: int) -> np.ndarray:
        return self.table[row, : self.filled[row]].copy()

    def missing(self, rows: np.ndarray, pages: np.ndarray) -> np.ndarray:
        return np.maximum(0, pages - self.filled[rows]) + self._to_copy[rows]

    def pages_at(self, row: int, blocks: np.ndarray) -> np.ndarray:
        """Pages of blocks, NO_PAGE where there is none."""
        at = np.minimum(blocks, self.table.shape[1] - 1)
        return np.where(at == blocks, self.table[row, at], NO_PAGE)

    def _grow(self, columns: int) -> None:
        have = self.table.shape[1]
        if columns > have:
            more = ((0, 0), (0, max(columns, 2 * have) - have))
            self.table = np.pad(self.table, more, constant_values=NO_PAGE)
            self.owned = np.pad(self.owned, more)
        assert self.table.shape == self.owned.shape and self.table.shape[1] >= columns

    def plan(
        self,
        row: int,
        start: int,
        stop: int,
        *,
        marks: Sequence[int] = (),
        write_from: int = 0,
        steady: bool = False,
    ) -> BlockPlan:
        """See the base. Of what is written, only the first block may be there already."""
        assert start < stop and all(start < mark <= stop for mark in marks)
        write_from = max(start, write_from)
        first = write_from // self._block
        behind = ceil_div(stop, self._block) if write_from < stop else 0
        there = first < min(behind, int(self.filled[row]))
        mine = there and bool(self.owned[row, first])
        copies = there and not mine and first * self._block < write_from
        return BlockPlan(
            row=row,
            start=start,
            stop=stop,
            fresh=False,
            write_from=write_from,
            blocks=range(first, behind),
            new=range(first + mine, behind),
            copied=[first] * copies,
        )

    def apply(self, plan: BlockPlan) -> Applied:
        """See the base."""
        row, blocks = plan.row, plan.blocks
        first, stop = (blocks[0], blocks[-1] + 1) if blocks else (0, 0)
        self._grow(stop)
        new = slice(stop - len(plan.new), stop)
        old = self.table[row, new][: len(plan.copied)].tolist()
        targets = self._pool.allocate(self.layout.bucket, len(plan.new))
        self.table[row, new], self.owned[row, new] = targets, True
        if plan.new:
            self.filled[row] = max(int(self.filled[row]), stop)
        if plan.copied:
            self._to_copy[row] = 0
        span = Span(plan=plan, pages=self.table[row, first:stop], past=NO_PAGES)
        assert len(span.pages) == len(blocks) and self.owned[row, new].all()
        copied = targets[: len(old)].tolist()
        return Applied(span=span, jobs=copy_jobs(old, copied, self.layout.page_units), gone=old)

    def plan_token(self, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Rows whose token ``n`` begins a block that has no page yet. Changes nothing."""
        return rows[n // self._block >= self.filled[rows]]

    def append(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Give each of these rows a new page for its next block."""
        columns = self.filled[rows]
        self._grow(int(columns.max(initial=-1)) + 1)
        self.table[rows, columns] = pages
        self.owned[rows, columns] = True
        self.filled[rows] += 1
        assert (self.table[rows, self.filled[rows] - 1] != NO_PAGE).all(), "blocks without gaps"

    def swap(self, row: int, block: int, page: int) -> int:
        """Put an equal shared page in a block's place; returns the page that stood there."""
        old = int(self.table[row, block])
        assert old not in (NO_PAGE, page), "a block is traded for an equal one elsewhere"
        self.table[row, block], self.owned[row, block] = page, False
        return old

    def adopt(self, row: int, blocks: np.ndarray, pages: np.ndarray, *, filled: int) -> None:
        assert self.filled[row] == 0 and len(blocks) == len(pages)
        if len(blocks):
            self._grow(int(blocks[-1]) + 1)
        self.table[row, blocks] = pages
        self.filled[row], self._to_copy[row] = len(blocks), filled % self._block > 0
        assert len(blocks) == ceil_div(filled, self._block), "adopted blocks have no gaps"

    def fork(self, source: int, row: int, n: int) -> np.ndarray:
        assert self.filled[row] == 0, "a fork begins on an empty row"
        self.table[row], self.owned[row] = self.table[source], False
        self.filled[row], self._to_copy[row] = self.filled[source], n % self._block > 0
        return self.held_pages(row)

    def clear(self, row: int) -> np.ndarray:
        pages = self.held_pages(row)
        filled = int(self.filled[row])
        self.table[row, :filled], self.owned[row, :filled] = NO_PAGE, False
        self.filled[row] = self._to_copy[row] = 0
        assert len(pages) == filled
        return pages

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.table)

    def check(self, row: int, n: int) -> None:
        filled = int(self.filled[row])
        assert self.table.shape == self.owned.shape
        assert len(self.filled) == len(self._to_copy) == len(self.table)
        assert (self.table[row, :filled] != NO_PAGE).all(), "blocks without gaps"
        assert (self.table[row, filled:] == NO_PAGE).all(), "no page behind the last block"
        assert not self.owned[row, filled:].any() and filled >= ceil_div(n, self._block)
        assert self._to_copy[row] in (0, 1) and filled >= self._to_copy[row]


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnPlan:
    """What one more token of several requests asks of rings. Made by ``Rings.plan_turn``, carried
    out by ``Rings.turn``.

    Arrays of one item per ring and request in question, ring after ring: ring, row, token n, its
    block's column (of all columns). fills: the token begins its block. takes: such a block needs
    a page; the others find one in their column that nobody else uses.
    """

    ring: np.ndarray
    row: np.ndarray
    n: np.ndarray
    column: np.ndarray
    fills: np.ndarray
    takes: np.ndarray

    def wanted(self, rings: int) -> list[int]:
        """Pages to be allocated, by ring."""
        return np.bincount(self.ring[self.takes], minlength=rings).tolist()


class Rings:
    """All ring tables of a model side by side. A *ring* here is a number, in the order of
    ``layouts``.

    table: int32 [rows, all columns]. owned: bool alike. Per ring: ``slices`` of its columns.
    Per column: ``ring_of``.
    """

    def __init__(self, layouts: Sequence[GroupLayout], pool: PagePool, *, rows: int) -> None:
        self.layouts, self._pool = tuple(layouts), pool
        widths = [(layout.fixed or 0) + layout.turning for layout in self.layouts]
        starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        self.slices = tuple(
            slice(int(start), int(start) + width)
            for start, width in zip(starts, widths, strict=False)
        )
        self.ring_of = np.repeat(np.arange(len(widths)), widths)
        self.table = np.full((rows, int(starts[-1])), NO_PAGE, np.int32)
        self.owned = np.zeros_like(self.table, bool)
        self.block = np.array([layout.block_tokens for layout in self.layouts], np.int64)
        self._fixed = np.array([layout.fixed or 0 for layout in self.layouts], np.int64)
        self._turning = np.array([max(1, layout.turning) for layout in self.layouts], np.int64)
        # First turning column of every ring, and every column's place among those of its ring;
        # negative for columns of blocks that stay.
        self._first = starts[:-1] + self._fixed
        self._place = np.arange(len(self.ring_of)) - self._first[self.ring_of]
        self._starts, self._turns = starts[:-1], self._place >= 0
        self._any_fixed = bool(self._fixed.any())
        self._block_of, self._fixed_of = self.block[self.ring_of], self._fixed[self.ring_of]
        self._turning_of = self._turning[self.ring_of]
        self._reads_first = np.array(
            [layout.group.law.reads_before_writing for layout in self.layouts], bool
        )

    # -- questions ---------------------------------------------------------------------------------

    def columns_at(self, start: np.ndarray) -> np.ndarray:
        """Columns [rings, R] of the blocks of tokens ``start`` [R]."""
        turn = start // self.block[:, None]
        if not self._any_fixed:
            return self._first[:, None] + turn % self._turning[:, None]
        turn -= self._fixed[:, None]
        return self._first[:, None] + np.where(turn < 0, turn, turn % self._turning[:, None])

    def blocks_at(self, n: np.ndarray, columns: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Which block [R, columns] every column holds when ``n`` [R] tokens are there, if it has a
        page.
        """
        place, fixed = self._place[columns], self._fixed_of[columns]
        last = (n[:, None] - 1) // self._block_of[columns] - fixed
        blocks = last - (last - place) % self._turning_of[columns] + fixed
        return np.where(place < 0, place + fixed, blocks) if self._any_fixed else blocks

    def alone(self, rows: np.ndarray) -> np.ndarray:
        """Bool [R, rings]: has every turning column of a ring a page of these rows' own that nobody
        else uses?
        """
        pages = self.table[rows]
        fine = (pages != NO_PAGE) & self.owned[rows] & self._turns
        fine[fine] = self._pool.exclusive(pages[fine])
        fine |= ~self._turns
        return np.logical_and.reduceat(fine, self._starts, axis=1)

    def plan_turn(self, ring: np.ndarray, row: np.ndarray, n: np.ndarray) -> TurnPlan:
        """What token ``n`` of rows needs of rings, where no row shares the block it writes into.
        Arrays of equal length, rings ascending. Changes nothing.
        """
        turn = n // self.block[ring] - self._fixed[ring]
        column = self._first[ring] + np.where(turn < 0, turn, turn % self._turning[ring])
        pages = self.table[row, column]
        fills = (pages == NO_PAGE) | (n % self.block[ring] == 0)
        takes, own = fills.copy(), fills & (pages != NO_PAGE) & self.owned[row, column]
        if own.any():
            takes[own] = ~self._pool.exclusive(pages[own])
        return TurnPlan(ring=ring, row=row, n=n, column=column, fills=fills, takes=takes)

    # -- transitions -------------------------------------------------------------------------------

    def turn(self, plan: TurnPlan, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Carry a plan out with the new pages that it wants, ring after ring.

        Returns the pages let go, for the caller to release; and bool, of all items of the plan,
        those whose token reads another page than it writes.
        """
        row, column = plan.row[plan.takes], plan.column[plan.takes]
        old = self.table[row, column]
        self.table[row, column] = pages
        self.owned[plan.row[plan.fills], plan.column[plan.fills]] = True
        gone = [old[old != NO_PAGE]]
        for ring, layout in enumerate(self.layouts):
            if layout.group.law.next_release(0) is not None:
                mine = plan.ring == ring
                gone.append(self._hand_back(ring, plan.row[mine], plan.n[mine]))
        assert (self.table[plan.row, plan.column] != NO_PAGE).all(), "every token has its page"
        return np.concatenate(gone), plan.takes & self._reads_first[plan.ring]

    def _hand_back(self, ring: int, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Let everything go that is no longer needed, of a law that lets go of much at once; other
        laws keep it until its column is wanted.
        """
        columns, block = self.slices[ring], self.block[ring]
        # The block of token n is there by now.
        blocks = self.blocks_at(n + 1, columns)
        first = self.layouts[ring].group.law.first(n) // block
        old = (self.table[rows, columns] != NO_PAGE) & (blocks < first[:, None])
        old &= self._place[columns] >= 0
        at, place = np.nonzero(old)
        rows, places = rows[at], place + columns.start
        gone = self.table[rows, places]
        self.table[rows, places], self.owned[rows, places] = NO_PAGE, False
        return gone

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.table)


class RingTable(GroupTable):
    """Of a law that lets go: one of the ``rings``, whose columns its tables are views of."""

    def __init__(self, rings: Rings, ring: int, pool: PagePool) -> None:
        super().__init__(rings.layouts[ring], pool)
        columns = rings.slices[ring]
        self.table, self.owned = rings.table[:, columns], rings.owned[:, columns]
        self._fixed, self._turning = self.layout.fixed or 0, self.layout.turning
        self._column = self.layout.column

    def held_blocks(self, row: int, n: int) -> dict[int, int]:
        """Blocks in the table of a row of ``n`` tokens, each with its column: first those that
        take turns.
        """
        last = (n - 1) // self._block - self._fixed
        pages, held = self.table[row].tolist(), {}
        for place in range(self._turning):
            if pages[self._fixed + place] != NO_PAGE:
                block = last - (last - place) % self._turning + self._fixed
                held[block] = self._fixed + place
        for column in range(self._fixed):
            if pages[column] != NO_PAGE:
                held[column] = column
        return held

    def num_blocks(self, rows: np.ndarray) -> np.ndarray:
        return np.count_nonzero(self.table[rows] != NO_PAGE, axis=1)

    def missing(self, rows: np.ndarray, pages: np.ndarray) -> np.ndarray:
        return np.maximum(0, pages - np.count_nonzero(self.owned[rows], axis=1))

    def pages_of(self, row: int, blocks: np.ndarray, n: int) -> np.ndarray | None:
        """Pages of blocks that are all in the table of a row of ``n`` tokens, else None."""
        held = self.held_blocks(row, n)
        if any(block not in held for block in blocks.tolist()):
            return None
        return self.table[row, self.layout.columns(blocks)].copy()

    def plan(
        self,
        row: int,
        start: int,
        stop: int,
        *,
        marks: Sequence[int] = (),
        write_from: int = 0,
        steady: bool = False,
    ) -> BlockPlan:
        """See the base."""
        assert start < stop and all(start < mark <= stop for mark in marks)
        fresh, size = self.layout.reads_fresh(start, stop), self._block
        refills = self.layout.refills(start, stop) if fresh else range(0)
        whole = len(refills) == self._turning > 0
        if whole and steady and not marks:
            return BlockPlan(
                row=row,
                start=start,
                stop=stop,
                fresh=True,
                write_from=start,
                blocks=refills,
                refills=True,
                turns=True,
            )
        promised = {mark: blocks_of(self.law.needs(mark), size) for mark in marks}
        needs = self.law.needs(stop) if fresh else (*self.law.needs(start), (start, stop))
        stays = {*blocks_of(needs, size), *refills}
        held, owned = self.held_blocks(row, start), self.owned[row].tolist()
        if steady:
            held = dict(sorted(held.items()))
        keep = stays.union(*promised.values()) if promised else stays
        written = range(start // size, ceil_div(stop, size))
        blocks = sorted(block for block in keep if block in written)
        new = [block for block in blocks if block not in held or not owned[held[block]]]
        copied = [block for block in new if block in held and block * size < start]
        # A page that this request alone holds and no checkpoint keeps can take a new block; a copy
        # needs a page of its own.
        loose = []
        if len(new) > len(copied):
            loose = [at for block, at in held.items() if block not in keep and owned[at]]
        return BlockPlan(
            row=row,
            start=start,
            stop=stop,
            fresh=fresh,
            write_from=start,
            blocks=blocks,
            new=new,
            copied=copied,
            stays=stays,
            held=held,
            loose=loose,
            pages=self.table[row, loose] if loose else NO_PAGES,
            promised=promised,
            refills=whole,
        )

    def apply(self, plan: BlockPlan) -> Applied:
        """See the base."""
        past = self.table[plan.row].copy()
        if plan.turns:
            pages = past[self.layout.columns(np.array(plan.blocks))]
            return Applied(span=Span(plan=plan, pages=pages, past=past))
        table = past.tolist()
        targets = self._pool.allocate(self.layout.bucket, plan.wanted).tolist()
        targets += [table[at] for at in plan.recycled]
        fresh = [block for block in plan.new if block not in plan.copied]
        page_of = dict(zip([*plan.copied, *fresh], targets, strict=True))
        olds = [table[plan.held[block]] for block in plan.copied]
        news = [page_of[block] for block in plan.copied]
        gone = self._rewrite(plan, table, page_of)

        def page(block: int) -> int:
            return page_of[block] if block in page_of else table[self._column(block)]

        promised = {}
        for mark, blocks in plan.promised.items():
            assert all(b in page_of or b in plan.stays for b in blocks), (
                "a checkpoint's blocks are held"
            )
            pages = np.array([page(block) for block in blocks], np.int32)
            promised[mark] = Promise(blocks=np.array(blocks, np.int64), pages=pages)
        if promised:
            gone += [page for block, page in page_of.items() if block not in plan.stays]
        written = np.array([page(block) for block in plan.blocks], np.int32)
        assert (written != NO_PAGE).all(), "every block that is written has a page"
        return Applied(
            span=Span(plan=plan, pages=written, past=past),
            jobs=copy_jobs(olds, news, self.layout.page_units),
            promised=promised,
            gone=gone,
        )

    def _rewrite(self, plan: BlockPlan, table: list[int], page_of: dict[int, int]) -> list[int]:
        """Empty the columns of blocks that leave, and enter new pages of those that stay. Returns
        pages to be released.

        table: of the row, brought up to date. page_of: of the new blocks; those that only
        checkpoints keep are added.
        """
        owned, released = self.owned[plan.row].tolist(), []
        promised = set().union(*plan.promised.values())
        for block, at in plan.held.items():
            if block in plan.stays:
                continue
            if block in promised and block not in page_of:
                page_of[block] = table[at]
            elif at not in plan.recycled:
                released.append(table[at])
            table[at], owned[at] = NO_PAGE, False
        for block in plan.new:
            if block not in plan.stays:
                continue
            at = self._column(block)
            if block in plan.held:
                released.append(table[at])
            table[at], owned[at] = page_of[block], True
        self.table[plan.row], self.owned[plan.row] = table, owned
        return released

    def adopt(self, row: int, blocks: np.ndarray, pages: np.ndarray, *, filled: int) -> None:
        assert (self.table[row] == NO_PAGE).all() and len(blocks) == len(pages)
        self.table[row, self.layout.columns(blocks)] = pages
        assert np.count_nonzero(self.table[row] != NO_PAGE) == len(blocks), "a column for each"

    def fork(self, source: int, row: int, n: int) -> np.ndarray:
        assert (self.table[row] == NO_PAGE).all(), "a fork begins on an empty row"
        self.table[row], self.owned[row] = self.table[source], False
        return self.held_pages(row)

    def clear(self, row: int) -> np.ndarray:
        pages = self.held_pages(row)
        self.table[row], self.owned[row] = NO_PAGE, False
        assert len(np.unique(pages)) == len(pages), "a page is one block's"
        return pages

    def check(self, row: int, n: int) -> None:
        assert self.table.shape == self.owned.shape
        assert not (self.owned[row] & (self.table[row] == NO_PAGE)).any(), "what is owned is there"
        held = self.held_blocks(row, n)
        assert all(0 <= block * self._block < max(n, 1) for block in held), "blocks of its tokens"
        assert all(self._column(block) == column for block, column in held.items())
