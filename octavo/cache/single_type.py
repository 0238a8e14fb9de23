"""Tables of one group: which page holds which block of which request.

Owns ``SingleTypeKVCacheManager``: one class, one instance per group, driven by the group's law
alone. Knows blocks, laws and the pool; knows no keys, no prefix index and no other group. It never
evicts: whoever calls ``apply`` has made the pool ready.

Blocks of a law that lets go live in a **ring**: block b has column ``fixed + (b - fixed) %
turning``. Once every column holds a page that nobody else uses, the ring is *steady*: a page
leaving ``needs`` is the page of the block entering it, so nothing here is touched again until the
law's next release.

Chunks of tokens are planned request by request (``plan``, ``apply``); single tokens of many
requests together (``turn``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.base import NO_PAGE, blocks_of, ceil_div
from octavo.cache.block_plan import (
    NEVER,
    NO_PAGES,
    Applied,
    BlockPlan,
    Promise,
    Span,
    TurnPlan,
    blocks_in,
)
from octavo.cache.group_step import GroupStep, StepRows, copy_jobs
from octavo.cache.layout import GroupLayout
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap


class SingleTypeKVCacheManager:
    """The tables of one group for ``rows`` requests."""

    def __init__(self, layout: GroupLayout, pool: PagePool, *, rows: int) -> None:
        self.layout = layout
        self.law = layout.group.law
        self._pool, self._block = pool, layout.block_tokens
        self._fixed, self._turning = layout.fixed, layout.turning
        self._ring_start, self._column, self._columns = (
            layout.fixed or 0,
            layout.column,
            layout.columns,
        )
        columns = 16 if layout.fixed is None else layout.fixed + layout.turning
        self.table = np.full((rows, columns), NO_PAGE, np.int32)
        self._owned = np.zeros((rows, columns), bool)
        self._ring = np.full((rows, layout.turning), -1, np.int64)
        self._steady = np.zeros(rows, bool)
        self.next_event = np.zeros(rows, np.int64)
        self._to_copy = np.zeros(rows, np.int64)
        self._filled = np.zeros(rows, np.int64)
        self._spans: dict[int, Span] = {}
        # Of single tokens, whether their past is read before anything is written: alike for all
        # rows, and never changed.
        self._fresh = np.full(rows, self.law.reads_before_writing)
        self._promises: dict[int, dict[int, Promise]] = {}
        # Of laws that read a page and write another for one token: the table as it was, and for
        # which rows that counts.
        self._past, self._turned = np.zeros_like(self.table), np.zeros(rows, bool)
        # By column, the newest checkpoint that decoding has left behind.
        self.kept = np.full_like(self.table, NO_PAGE)

    # -- addresses ---------------------------------------------------------------------------------

    def _holds(self, row: int, blocks: np.ndarray) -> np.ndarray:
        """Where the table has the block itself, not another in its column."""
        columns = self._columns(blocks)
        present = columns < self.table.shape[1]
        present[present] = self.table[row, columns[present]] != NO_PAGE
        if self._turning:
            turns = present & (blocks >= self._fixed)
            present[turns] = self._ring[row, columns[turns] - self._fixed] == blocks[turns]
        return present

    def _grow_table(self, columns: int) -> None:
        if columns <= self.table.shape[1]:
            return
        width = max(columns, 2 * self.table.shape[1])
        more = ((0, 0), (0, width - self.table.shape[1]))
        self.table = np.pad(self.table, more, constant_values=NO_PAGE)
        self._owned = np.pad(self._owned, more)

    def blocks_needed(self, n: int) -> np.ndarray:
        """Blocks that computing token ``n`` needs, ascending."""
        return blocks_in(self.law.needs(n), self._block)

    def held_blocks(self, row: int, n: int) -> dict[int, int]:
        """Blocks in the table of a bounded row of ``n`` tokens, each with its column."""
        if self._steady[row]:
            behind = (n - 1) // self._block + 1
            held = {block: self._column(block) for block in range(behind - self._turning, behind)}
        else:
            held = {
                block: column
                for column, block in enumerate(self._ring[row].tolist(), self._ring_start)
                if block >= 0
            }
        for column in range(self._ring_start):
            if self.table[row, column] != NO_PAGE:
                held[column] = column
        return held

    def pages_at(self, row: int, blocks: np.ndarray) -> np.ndarray:
        """Pages in the columns of blocks of a group that never lets go, NO_PAGE behind the
        table.
        """
        at = np.minimum(blocks, self.table.shape[1] - 1)
        return np.where(at == blocks, self.table[row, at], NO_PAGE)

    def pages_of(self, row: int, blocks: np.ndarray) -> np.ndarray | None:
        """Pages of blocks that are all in the table, else None."""
        if not self._holds(row, blocks).all():
            return None
        return self.table[row, self._columns(blocks)].copy()

    # -- one step ----------------------------------------------------------------------------------

    def _settled(self, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Blocks in the rings [R, turning] when ``n`` tokens are there; nobody kept count of steady
        ones while they turned.
        """
        steady, ring = self._steady[rows], self._ring[rows]
        if np.count_nonzero(steady):
            last = (n[steady, None] - 1) // self._block
            ring[steady] = (
                last - (last - self._ring_start - np.arange(self._turning)) % self._turning
            )
        return ring

    def settle(self, row: int, n: int) -> None:
        """Write down which blocks a steady ring holds when ``n`` tokens are there."""
        if self._steady[row]:
            self._ring[row] = self._settled(np.array([row]), np.array([n]))[0]
            self._steady[row] = False
            # Until its next plan the row is looked after again, whatever becomes of the one that
            # asked.
            self.next_event[row] = min(self.next_event[row], n)

    def plan(
        self, row: int, start: int, stop: int, *, marks: Sequence[int] = (), write_from: int = 0
    ) -> BlockPlan:
        """What tokens ``[start, stop)`` need, with checkpoints after ``marks`` tokens. Changes
        nothing.
        """
        assert start < stop and all(start < mark <= stop for mark in marks)
        if self._fixed is None:
            return self._plan_append(row, start, stop, max(start, write_from))
        fresh, size = self.layout.reads_fresh(start, stop), self._block
        refills = self.layout.refills(start, stop) if fresh else range(0)
        if len(refills) == self._turning > 0 and self._steady[row] and not marks:
            return BlockPlan(
                row=row,
                start=start,
                stop=stop,
                fresh=True,
                write_from=start,
                blocks=refills,
                turns=True,
            )
        promised = {mark: blocks_of(self.law.needs(mark), size) for mark in marks}
        stays = set(
            blocks_of(
                self.law.needs(stop) if fresh else (*self.law.needs(start), (start, stop)), size
            )
        )
        stays.update(refills)
        held, owned = self.held_blocks(row, start), self._owned[row].tolist()
        keep = stays.union(*promised.values()) if promised else stays
        written = range(start // size, ceil_div(stop, size))
        blocks = sorted(block for block in keep if block in written)
        new = [block for block in blocks if block not in held or not owned[held[block]]]
        copied = [block for block in new if block in held and block * size < start]
        # A page that this request alone holds and no checkpoint keeps can take a new block; a copy
        # needs a page of its own.
        loose = (
            [at for block, at in held.items() if block not in keep and owned[at]]
            if len(new) > len(copied)
            else []
        )
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
            refills=len(refills) == self._turning > 0,
        )

    def _plan_append(self, row: int, start: int, stop: int, write_from: int) -> BlockPlan:
        """The same for a group that never lets go: of what is written, only the first block may be
        there already.
        """
        first, behind = (
            write_from // self._block,
            ceil_div(stop, self._block) if write_from < stop else 0,
        )
        there = first < min(behind, self.table.shape[1]) and bool(self.table[row, first] != NO_PAGE)
        mine = there and bool(self._owned[row, first])
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
        """Carry a plan out. The pool must be ready for ``plan.wanted`` pages."""
        row = plan.row
        # Decoding plans all rows together: only then is it worth asking how long a row needs
        # nothing.
        self.next_event[row] = plan.stop
        if plan.copied:
            self._to_copy[row] = 0
        if self._fixed is None:
            return self._append(plan)
        past = self.table[row].copy()
        if plan.turns:
            pages = past[self._columns(np.arange(plan.blocks[0], plan.blocks[-1] + 1))]
            self._spans[row] = Span(plan=plan, pages=pages, past=past)
            return Applied()
        table = past.tolist()
        targets = self._pool.allocate(self.layout.bucket, plan.wanted).tolist() + [
            table[at] for at in plan.recycled
        ]
        page_of = dict(
            zip(
                [*plan.copied, *(b for b in plan.new if b not in plan.copied)], targets, strict=True
            )
        )
        olds, news = (
            [table[plan.held[block]] for block in plan.copied],
            [page_of[block] for block in plan.copied],
        )
        gone, kept = self._rewrite(plan, table, page_of), []
        pages = [page_of[b] if b in page_of else table[self._column(b)] for b in plan.blocks]
        self._spans[row] = Span(plan=plan, pages=np.array(pages, np.int32), past=past)
        if plan.promised:
            kept = self._promise(plan, table, page_of)
            gone += [page for block, page in page_of.items() if block not in plan.stays]
        return Applied(jobs=copy_jobs(olds, news, self.layout.page_units), kept=kept, gone=gone)

    def _rewrite(self, plan: BlockPlan, table: list[int], page_of: dict[int, int]) -> list[int]:
        """Empty the columns of blocks that leave, and enter new pages of those that stay. Returns
        pages to be released.

        table: of the row, brought up to date. page_of: of the new blocks; those that only
            checkpoints keep are added.
        """
        row, owned, ring = plan.row, self._owned[plan.row].tolist(), [-1] * self._turning
        promised, released = set().union(*plan.promised.values()), []
        for block, at in plan.held.items():
            if block in plan.stays:
                if at >= self._ring_start:
                    ring[at - self._ring_start] = block
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
            if at >= self._ring_start:
                ring[at - self._ring_start] = block
        self.table[row], self._ring[row], self._owned[row] = table, ring, owned
        self._filled[row] = len(table) - table.count(NO_PAGE)
        # New pages are nobody else's, unless a checkpoint keeps them.
        self._steady[row] = plan.refills and not promised
        return released

    def _append(self, plan: BlockPlan) -> Applied:
        """Carry out a plan of a group that never lets go."""
        row, first, stop = (
            plan.row,
            plan.blocks[0] if plan.blocks else 0,
            plan.blocks[-1] + 1 if plan.blocks else 0,
        )
        self._grow_table(stop)
        new = slice(stop - len(plan.new), stop)
        old = self.table[row, new][: len(plan.copied)].tolist()
        targets = self._pool.allocate(self.layout.bucket, len(plan.new))
        self.table[row, new], self._owned[row, new] = targets, True
        if plan.new:
            self._filled[row] = max(int(self._filled[row]), stop)
        self._spans[row] = Span(plan=plan, pages=self.table[row, first:stop], past=targets[:0])
        return Applied(
            jobs=copy_jobs(old, targets[: len(old)].tolist(), self.layout.page_units), gone=old
        )

    def _promise(self, plan: BlockPlan, table: list[int], page_of: dict[int, int]) -> list[int]:
        """Note what checkpoints keep; returns the pages, for the caller to retain."""
        kept: list[int] = []
        for mark, blocks in plan.promised.items():
            assert all(block in page_of or block in plan.stays for block in blocks), (
                "a checkpoint's blocks are held"
            )
            pages = [page_of[b] if b in page_of else table[self._column(b)] for b in blocks]
            promise = Promise(blocks=np.array(blocks, np.int64), pages=np.array(pages, np.int32))
            self._promises.setdefault(plan.row, {})[mark] = promise
            kept += pages
        return kept

    def schedule(self, plan: TurnPlan, alone: np.ndarray) -> None:
        """Note at which ``start`` rows that have turned need more than the next row of a page they
        own.

        alone: bool, of ``plan.pages``, those that nobody else uses.
        """
        rows, n = plan.rows, plan.n + 1
        block, inside = n // self._block, n % self._block > 0
        if self._fixed is None:
            at = np.minimum(block, self.table.shape[1] - 1)
            self.next_event[rows] = np.where(
                inside & self._owned[rows, at], (block + 1) * self._block, n
            )
            return
        steady = np.zeros(len(rows), bool) if plan.full is None else plan.full
        if len(alone):
            steady[steady] = alone.reshape(-1, self._turning).all(axis=1)
        self._steady[rows] = steady
        release = self.law.next_release(n - 1)
        idle: Any = NEVER if release is None else release
        writable: Any = False
        if not (self.law.reads_before_writing or steady.all()):
            writable = (
                inside
                & self._has(rows, block, self._ring[rows])
                & self._owned[rows, self._columns(block)]
            )
        self.next_event[rows] = np.where(
            steady, idle, np.where(writable, (block + 1) * self._block, n)
        )

    def _has(self, rows: np.ndarray, block: np.ndarray, ring: np.ndarray) -> np.ndarray:
        """Bool [R]: does each bounded row's table have this block of its own?"""
        column = self._columns(block)
        turns = np.maximum(0, column - self._ring_start)
        found = self.table[rows, column] != NO_PAGE
        if self._turning:
            found &= (column < self._ring_start) | (ring[np.arange(len(rows)), turns] == block)
        return found

    # -- single tokens of many requests ------------------------------------------------------------

    def plan_turn(self, rows: np.ndarray, n: np.ndarray) -> TurnPlan:
        """What token ``n`` of every row needs, where no row shares the block it writes into.
        Changes nothing.
        """
        block, reuses = n // self._block, np.zeros(len(rows), bool)
        if self._fixed is None:
            ring, fills = np.zeros((len(rows), 0), np.int64), block >= self._filled[rows]
            return TurnPlan(
                rows=rows,
                n=n,
                column=block,
                ring=ring,
                fills=fills,
                loose=reuses,
                reuses=reuses,
                pages=NO_PAGES,
            )
        column, ring = self._columns(block), self._settled(rows, n)
        fills = ~self._has(rows, block, ring)
        loose = fills & (self.table[rows, column] != NO_PAGE) & self._owned[rows, column]
        pages = self.table[rows[loose], column[loose]]
        return TurnPlan(
            rows=rows,
            n=n,
            column=column,
            ring=ring,
            fills=fills,
            loose=loose,
            reuses=reuses,
            pages=pages,
        )

    def turn(self, plan: TurnPlan) -> np.ndarray:
        """Carry a plan out, but for ``schedule``; returns the pages let go, for the caller to
        release.

        The pool must be ready for ``plan.wanted``.
        """
        rows, fills = plan.rows[plan.fills], plan.column[plan.fills]
        moved = ~plan.reuses[plan.fills]
        takers, into = rows[moved], fills[moved]
        self._ring[plan.rows], self._steady[plan.rows] = plan.ring, False
        if self._fixed is None and len(fills):
            self._grow_table(int(fills.max()) + 1)
        old = self.table[takers, into]
        if self.law.reads_before_writing:
            self._past[takers], self._turned[takers] = self.table[takers], True
        self.table[takers, into] = self._pool.allocate(self.layout.bucket, len(takers))
        self._owned[rows, fills] = True
        replaced = old != NO_PAGE
        self._filled[takers] += ~replaced
        if self._turning:
            turns = fills >= self._ring_start
            self._ring[rows[turns], fills[turns] - self._ring_start] = (plan.n // self._block)[
                plan.fills
            ][turns]
        gone = old[replaced]
        if self.law.next_release(0) is not None:
            gone = np.concatenate([gone, self._hand_back(plan)])
        plan.pages = NO_PAGES
        if self._turning:
            full = (self._ring[plan.rows] >= 0).all(axis=1) & self._owned[
                plan.rows, self._ring_start :
            ].all(axis=1)
            plan.full = full & ((plan.n + 1) // self._block >= self._ring_start)
            plan.pages = self.table[plan.rows[plan.full], self._ring_start :].reshape(-1)
        return gone

    def _hand_back(self, plan: TurnPlan) -> np.ndarray:
        """Let everything go that is no longer needed; other laws keep it until its column is
        wanted.
        """
        ring = self._ring[plan.rows]
        at, turns = np.nonzero(
            (ring >= 0) & (ring < (self.law.first(plan.n) // self._block)[:, None])
        )
        rows, columns = plan.rows[at], turns + self._ring_start
        gone = self.table[rows, columns]
        self.table[rows, columns], self._owned[rows, columns], self._ring[rows, turns] = (
            NO_PAGE,
            False,
            -1,
        )
        np.subtract.at(self._filled, rows, 1)
        return gone

    # -- the newest checkpoint of decoding ---------------------------------------------------------

    def trade(self, rows: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where a ring of one page is read and then written, write token ``n`` to the page of the
        last checkpoint, and keep the ring's in its place: ``keep`` and a turn in one. Bool [R],
        rows for which that was done, and the pages to be kept and released; of the others nothing
        has changed.
        """
        if not self.law.reads_before_writing or self.table.shape[1] > 1:
            return np.zeros(len(rows), bool), NO_PAGES
        traded = (self.kept[rows, 0] != NO_PAGE) & (
            self._steady[rows] | (self._ring[rows, 0] == (n - 1) // self._block)
        )
        traded[traded] = self._pool.reclaim(self.kept[rows[traded], 0])
        rows = rows[traded]
        pages = self._past[rows] = self.table[rows]
        self.table[rows], self.kept[rows] = self.kept[rows], pages
        self._turned[rows] = self._owned[rows] = self._steady[rows] = True
        self.next_event[rows] = NEVER
        return traded, pages.reshape(-1)

    def keep(self, rows: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Note the pages that resuming at ``n`` needs. Returns those to keep now, and those to
        drop. A turn must follow.
        """
        ring, first = self._settled(rows, n), self.law.first(n) // self._block
        wanted = (ring >= first[:, None]) & (ring >= 0) & (ring * self._block < n[:, None])
        if self._ring_start:
            fixed = (
                np.arange(self._ring_start) * self._block
                < np.minimum(self.law.prefix or 0, n)[:, None]
            )
            wanted = np.concatenate([fixed, wanted], axis=1)
        pages, old = np.where(wanted, self.table[rows], NO_PAGE), self.kept[rows]
        changed = pages != old
        self.kept[rows] = pages
        return pages[changed & wanted], old[changed & (old != NO_PAGE)]

    def kept_pages(self, row: int, blocks: np.ndarray) -> np.ndarray:
        """The pages of blocks that are all kept."""
        return self.kept[row, self._columns(blocks)].copy()

    def keeps_idle(self, row: int) -> bool:
        """Is a page kept for this row that no request uses?"""
        pages = self.kept[row]
        return bool((self._pool.references(pages[pages != NO_PAGE]) == 0).any())

    def forget(self, row: int) -> None:
        """Keep nothing for a row any longer."""
        pages = self.kept[row]
        self._pool.drop(pages[pages != NO_PAGE])
        self.kept[row] = NO_PAGE

    # -- sharing and leaving -----------------------------------------------------------------------

    def adopt(
        self, row: int, n: int, blocks: np.ndarray, pages: np.ndarray, *, filled: int
    ) -> None:
        """Begin a request on shared pages, already retained: it reads them and copies a block
        before writing into it.

        filled: tokens that the pages hold; where they end inside a block, that block will be
            copied.
        """
        assert len(blocks) == len(pages) and not self._steady[row]
        self.next_event[row] = n
        columns = self._columns(blocks)
        if self._fixed is None and len(blocks):
            self._grow_table(int(columns[-1]) + 1)
        self.table[row, columns] = pages
        self._filled[row] = len(blocks)
        if self._turning:
            turns = blocks >= self._fixed
            self._ring[row, columns[turns] - self._fixed] = blocks[turns]
        self._to_copy[row] = filled % self._block > 0

    def fork(self, source: int, row: int, n: int) -> np.ndarray:
        """Begin a request on everything that ``source`` holds after ``n`` tokens; returns the
        pages, for the caller to retain.

        The source goes on writing into its last block; the new row copies that block before it
        does. The source's ring no longer turns by itself, since its pages are shared now.
        """
        assert not self._steady[row] and not self._promises.get(source)
        self.settle(source, n)
        self.table[row], self._ring[row] = self.table[source], self._ring[source]
        self._owned[row], self._filled[row] = False, self._filled[source]
        self.next_event[row] = n
        self._to_copy[row] = n % self._block > 0
        return self.held_pages(row)

    def swap(self, row: int, block: int, page: int) -> int:
        """Put an equal shared page in a block's place; returns the page that stood there."""
        assert self._fixed is None, "only blocks that stay are worth sharing late"
        old = int(self.table[row, block])
        self.table[row, block] = page
        self._owned[row, block] = False
        return old

    def promised_marks(self, row: int) -> list[int]:
        """Checkpoints whose pages are being kept."""
        return list(self._promises.get(row, ()))

    def take_promise(self, row: int, mark: int) -> Promise:
        """The pages a checkpoint kept, handed over with their references."""
        return self._promises[row].pop(mark)

    def clear(self, row: int) -> np.ndarray:
        """Forget a row; returns every page it held, for the caller to release."""
        pages = self.held_pages(row)
        self.forget(row)
        self._promises.pop(row, None)
        self.table[row], self._owned[row], self._ring[row] = NO_PAGE, False, -1
        self._steady[row] = self._turned[row] = False
        self.next_event[row] = self._to_copy[row] = self._filled[row] = 0
        self._spans.pop(row, None)
        return pages

    def held_pages(self, row: int) -> np.ndarray:
        """Every page a row has a reference on, checkpoints' included; once per reference."""
        promised = [promise.pages for promise in self._promises.get(row, {}).values()]
        table = self.table[row, : self._filled[row]] if self._fixed is None else self.table[row]
        return np.concatenate([table[table != NO_PAGE], *promised])

    def num_blocks(self, row: int) -> int:
        """Blocks in the table."""
        return int(self._filled[row])

    def held_bytes(self, rows: np.ndarray, unit_bytes: int) -> np.ndarray:
        """Bytes of the pages in the tables of rows."""
        return self._filled[rows] * (self.layout.page_units * unit_bytes)

    def missing(self, rows: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Pages that rows will still ask for on their way to ``pages`` blocks, that of a shared
        block to be copied included.
        """
        if self._fixed is None:
            return np.maximum(0, pages - self._filled[rows]) + self._to_copy[rows]
        return np.maximum(0, pages - self._owned[rows].sum(axis=1))

    def num_held(self, row: int) -> int:
        """Different pages that the row has references on."""
        return (
            len(set(self.held_pages(row).tolist()))
            if self._promises.get(row)
            else int(self._filled[row])
        )

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.table)
        moved.apply(self.kept)
        moved.apply(self._past)
        for span in self._spans.values():
            moved.apply(span.pages)
            moved.apply(span.past)
        for promises in self._promises.values():
            for promise in promises.values():
                moved.apply(promise.pages)

    # -- the step plan -----------------------------------------------------------------------------

    def group_step(self, step: StepRows) -> GroupStep:
        """This group's part of the step whose spans were applied since the last call."""
        rows, live = step.rows, self._fixed is None
        block = step.start // self._block
        column = np.minimum(block, self.table.shape[1] - 1) if live else self._columns(block)
        pages, places = (
            self.table[rows, column],
            (step.start - block * self._block).astype(np.int32),
        )
        table, fresh = (
            self.table if live else self.table.take(rows, axis=0),
            self._fresh[: len(rows)],
        )
        if self.law.reads_before_writing and self._turned.any():
            turned = self._turned[rows]
            table[turned] = self._past[rows[turned]]
            self._turned[:] = False
        if step.lengths is not None:
            pages, places = np.repeat(pages, step.lengths), np.repeat(places, step.lengths)
        if self._spans:
            fresh = fresh.copy()
            self._place(step, table, fresh, pages, places)
        return GroupStep(
            table=table,
            rows=step.names if live else step.order,
            fixed=self._fixed,
            turning=self._turning,
            block_tokens=self._block,
            fresh=fresh,
            write_page=pages,
            write_row=places,
        )

    def _place(
        self,
        step: StepRows,
        table: np.ndarray,
        fresh: np.ndarray,
        pages: np.ndarray,
        places: np.ndarray,
    ) -> None:
        """Enter the parts of requests that have a span, in place."""
        for index, row in enumerate(step.rows.tolist()):
            if (span := self._spans.pop(row, None)) is None:
                continue
            fresh[index] = span.plan.fresh
            part = slice(int(step.query_start[index]), int(step.query_start[index + 1]))
            pages[part], places[part] = span.placed(self._block, growing=self._fixed is None)
            if span.plan.fresh and self._fixed is not None:
                table[index] = span.past
        self._spans.clear()
