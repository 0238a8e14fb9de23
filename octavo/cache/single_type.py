"""Tables of one group: which page holds which block of which request.

Owns ``SingleTypeKVCacheManager``: one class, one instance per group, driven by the group's law alone. Knows blocks,
laws and the pool; knows no keys, no prefix index and no other group. It never evicts: whoever calls ``apply`` has made
the pool ready.

Blocks of a law that lets go live in a **ring**: block b has column ``fixed + (b - fixed) % turning``. Once every column
holds a page that nobody else uses, the ring is *steady*: a page leaving ``needs`` is the page of the block entering it,
so nothing here is touched again until the law's next release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE, Interval, blocks_of, ceil_div
from octavo.cache.group_step import CopyJob, GroupStep
from octavo.cache.layout import GroupLayout
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap

NEVER = int(np.iinfo(np.int64).max)
"""A position that no request reaches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPlan:
    """What tokens ``[start, stop)`` of one request ask of one group. Made by ``plan``, carried out by ``apply``.

    fresh: past is read from pages, the step's own entries are not (``GroupStep.fresh``).
    write_from: first token that is stored; those before it lie in shared pages already.
    blocks: blocks written, ascending. new: those that need a page. copied: those of new whose older rows must come along.
    table: blocks the table holds afterwards, of those in ``blocks`` or held now. leaving: columns let go.
    recycled: columns of ``leaving`` whose page becomes a new block's. promised: for every checkpoint its blocks.
    """

    row: int
    start: int
    stop: int
    fresh: bool
    write_from: int
    blocks: np.ndarray
    new: np.ndarray
    copied: np.ndarray
    table: np.ndarray
    leaving: np.ndarray
    recycled: np.ndarray
    promised: dict[int, np.ndarray]

    @property
    def wanted(self) -> int:
        """Pages to be allocated."""
        return len(self.new) - len(self.recycled)


@dataclass(kw_only=True, eq=False)
class _Span:
    """One request's part in the step being built, where it is more than one token into a page it has already."""

    plan: BlockPlan
    pages: np.ndarray
    past: np.ndarray


@dataclass(kw_only=True, eq=False)
class Promise:
    """Blocks and pages that a checkpoint keeps until its step's receipt. The pages are retained."""

    blocks: np.ndarray
    pages: np.ndarray


class SingleTypeKVCacheManager:
    """The tables of one group for ``rows`` requests."""

    def __init__(self, layout: GroupLayout, pool: PagePool, *, rows: int) -> None:
        self.layout = layout
        self.law = layout.group.law
        self._pool, self._block = pool, layout.block_tokens
        self._fixed, self._turning = layout.fixed, layout.turning
        self._ring_start = layout.fixed or 0
        columns = 16 if layout.fixed is None else layout.fixed + layout.turning
        self.table = np.full((rows, columns), NO_PAGE, np.int32)
        self._owned = np.zeros((rows, columns), bool)
        self._ring = np.full((rows, layout.turning), -1, np.int64)
        self._steady = np.zeros(rows, bool)
        self.next_event = np.zeros(rows, np.int64)
        self._to_copy = np.zeros(rows, np.int64)
        self._spans: dict[int, _Span] = {}
        self._promises: dict[int, dict[int, Promise]] = {}

    # -- addresses ---------------------------------------------------------------------------------------------------------

    def _columns(self, blocks: np.ndarray) -> np.ndarray:
        if self._fixed is None:
            return blocks
        return np.where(blocks < self._fixed, blocks, self._fixed + (blocks - self._fixed) % max(1, self._turning))

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

    def _blocks(self, intervals: Sequence[Interval]) -> np.ndarray:
        return np.array(blocks_of(intervals, self._block), np.int64)

    def blocks_needed(self, n: int) -> np.ndarray:
        """Blocks that computing token ``n`` needs, ascending."""
        return self._blocks(self.law.needs(n))

    def held_blocks(self, row: int) -> np.ndarray:
        """Blocks in the table, ascending."""
        fixed = np.flatnonzero(self.table[row, : self._fixed] != NO_PAGE)
        ring = self._ring[row]
        return np.concatenate([fixed, np.sort(ring[ring >= 0])])

    def pages_of(self, row: int, blocks: np.ndarray) -> np.ndarray | None:
        """Pages of blocks that are all in the table, else None."""
        if not self._holds(row, blocks).all():
            return None
        return self.table[row, self._columns(blocks)].copy()

    # -- one step ----------------------------------------------------------------------------------------------------------

    def settle(self, row: int, n: int) -> None:
        """Write down which blocks a steady ring holds when ``n`` tokens are there; nobody kept count while it turned."""
        if self._steady[row]:
            last = (n - 1) // self._block
            behind = (last - self._ring_start - np.arange(self._turning)) % self._turning
            self._ring[row] = last - behind
            self._steady[row] = False
            # Until its next plan the row is looked after again, whatever becomes of the one that asked.
            self.next_event[row] = min(self.next_event[row], n)

    def reads_fresh(self, start: int, stop: int) -> bool:
        """Must tokens ``[start, stop)`` be attended to before they are stored? Not while they and their past fit the ring."""
        if self._fixed is None:
            return False
        if self.law.reads_before_writing:
            return True
        oldest = max(min(self.law.first(start), start), self.law.prefix or 0) if start else 0
        return ceil_div(stop, self._block) - min(oldest, start) // self._block > self._turning

    def plan(self, row: int, start: int, stop: int, *, marks: Sequence[int] = (), write_from: int = 0) -> BlockPlan:
        """What tokens ``[start, stop)`` need, with checkpoints after ``marks`` tokens. Changes nothing; settle first."""
        assert start < stop and all(start < mark <= stop for mark in marks)
        write_from = max(start, write_from)
        fresh = self.reads_fresh(start, stop)
        promised = {mark: self.blocks_needed(mark) for mark in marks}
        if self._fixed is None:
            table = np.arange(write_from // self._block, ceil_div(stop, self._block))
            leaving, keep = np.zeros(0, np.int64), table
        else:
            table = self._blocks(self.law.needs(stop) if fresh else (*self.law.needs(start), (start, stop)))
            held = self.held_blocks(row)
            leaving = self._columns(held[~np.isin(held, table)])
            keep = np.unique(np.concatenate([table, *promised.values()]))
        blocks = keep[(keep * self._block < stop) & ((keep + 1) * self._block > write_from)] if write_from < stop else keep[:0]
        holds = self._holds(row, blocks)
        mine = holds.copy()
        mine[holds] = self._owned[row, self._columns(blocks[holds])]
        new = blocks[~mine]
        copied = blocks[holds & ~mine & (blocks * self._block < write_from)]
        recycled = self._recyclable(row, leaving, keep)[: len(new) - len(copied)]
        return BlockPlan(
            row=row, start=start, stop=stop, fresh=fresh, write_from=write_from, blocks=blocks, new=new, copied=copied,
            table=table, leaving=leaving, recycled=recycled, promised=promised,
        )  # fmt: skip

    def _recyclable(self, row: int, leaving: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Columns of ``leaving`` whose page this request alone holds and no checkpoint keeps."""
        blocks = self._ring[row, leaving - self._ring_start] if len(leaving) else leaving
        free = self._owned[row, leaving] & ~np.isin(blocks, keep) & self._pool.exclusive(self.table[row, leaving])
        return leaving[free]

    def apply(self, plan: BlockPlan, step: int) -> list[CopyJob]:
        """Carry a plan out in step ``step``. The pool must be ready for ``plan.wanted`` pages.

        Pages let go are released when the step's receipt arrives: until then its layers, or copies, may read them.
        """
        row = plan.row
        past = self.table[row].copy() if self._fixed is not None else self.table[row, :0]
        targets = np.concatenate([self._pool.allocate(self.layout.bucket, plan.wanted), self.table[row, plan.recycled]])
        order = np.concatenate([plan.copied, plan.new[~np.isin(plan.new, plan.copied)]])
        page_of = dict(zip(order.tolist(), targets.tolist(), strict=True))
        jobs = self._copies(row, plan.copied, page_of)
        moved_out, released = self._let_go(plan, page_of)
        self._store(plan, page_of)
        page_of = moved_out | page_of
        pages = np.array([page_of.get(b, NO_PAGE) for b in plan.blocks.tolist()], np.int32)
        stays = pages == NO_PAGE
        pages[stays] = self.table[row, self._columns(plan.blocks[stays])]
        self._spans[row] = _Span(plan=plan, pages=pages, past=past)
        if len(plan.copied):
            self._to_copy[row] = 0
        self._promise(plan, page_of)
        in_table = set(plan.table.tolist())
        released += [page for block, page in page_of.items() if block not in in_table]
        self._pool.release(np.array(released, np.int32), step)
        self._schedule_event(row, plan.stop)
        return jobs

    def _copies(self, row: int, blocks: np.ndarray, page_of: dict[int, int]) -> list[CopyJob]:
        sources = self.table[row, self._columns(blocks)].tolist()
        return [
            CopyJob(source=source, target=page_of[block], units=self.layout.page_units)
            for block, source in zip(blocks.tolist(), sources, strict=True)
        ]

    def _let_go(self, plan: BlockPlan, page_of: dict[int, int]) -> tuple[dict[int, int], list[int]]:
        """Empty the leaving columns and those whose page is replaced. Returns (kept for checkpoints, to be released)."""
        row, kept, released = plan.row, {}, []
        promised = {block for blocks in plan.promised.values() for block in blocks.tolist()}
        recycled = set(plan.recycled.tolist())
        for column in plan.leaving.tolist():
            block, page = int(self._ring[row, column - self._ring_start]), int(self.table[row, column])
            if block in promised and block not in page_of:
                kept[block] = page
            elif column not in recycled:
                released.append(page)
            self.table[row, column], self._owned[row, column] = NO_PAGE, False
            self._ring[row, column - self._ring_start] = -1
        replaced = plan.new[self._holds(row, plan.new)]
        released += self.table[row, self._columns(replaced)].tolist()
        return kept, released

    def _store(self, plan: BlockPlan, page_of: dict[int, int]) -> None:
        """Enter new pages of blocks that the table holds afterwards."""
        row = plan.row
        entering = plan.new[np.isin(plan.new, plan.table)]
        if not len(entering):
            return
        columns = self._columns(entering)
        if self._fixed is None:
            self._grow_table(int(columns[-1]) + 1)
        self.table[row, columns] = [page_of[block] for block in entering.tolist()]
        self._owned[row, columns] = True
        if self._turning:
            turns = entering >= self._fixed
            self._ring[row, columns[turns] - self._fixed] = entering[turns]

    def _promise(self, plan: BlockPlan, page_of: dict[int, int]) -> None:
        if self._fixed is None:
            return
        for mark, blocks in plan.promised.items():
            pages = np.array([page_of.get(block, NO_PAGE) for block in blocks.tolist()], np.int32)
            here = pages == NO_PAGE
            assert self._holds(plan.row, blocks[here]).all(), "a checkpoint's blocks are held"
            pages[here] = self.table[plan.row, self._columns(blocks[here])]
            self._pool.retain(pages)
            self._promises.setdefault(plan.row, {})[mark] = Promise(blocks=blocks, pages=pages)

    def _schedule_event(self, row: int, n: int) -> None:
        """Note at which ``start`` this row needs more than the next row of a page it owns."""
        block, at_border = divmod(n, self._block)
        if self._fixed is not None and self._turning and (self._ring[row] >= 0).all():
            own = self._owned[row, self._fixed :].all() and self._pool.exclusive(self.table[row, self._fixed :]).all()
            if own and (n == 0 or block >= self._fixed):
                self._steady[row] = True
                release = self.law.next_release(n - 1)
                self.next_event[row] = NEVER if release is None else release
                return
        here = np.array([block])
        writable = at_border and self._holds(row, here)[0] and self._owned[row, self._columns(here)[0]]
        self.next_event[row] = (block + 1) * self._block if writable and not self.law.reads_before_writing else n

    # -- sharing and leaving -----------------------------------------------------------------------------------------------

    def adopt(self, row: int, n: int, blocks: np.ndarray, pages: np.ndarray, *, filled: int) -> None:
        """Begin a request on shared pages, already retained: it reads them and copies a block before writing into it.

        filled: tokens that the pages hold; where they end inside a block, that block will be copied.
        """
        assert len(blocks) == len(pages) and not self._steady[row]
        columns = self._columns(blocks)
        if self._fixed is None and len(blocks):
            self._grow_table(int(columns[-1]) + 1)
        self.table[row, columns] = pages
        if self._turning:
            turns = blocks >= self._fixed
            self._ring[row, columns[turns] - self._fixed] = blocks[turns]
        self.next_event[row] = n
        self._to_copy[row] = filled % self._block > 0

    def fork(self, source: int, row: int, n: int) -> np.ndarray:
        """Begin a request on everything that ``source`` holds after ``n`` tokens; returns the pages, for the caller to retain.

        The source goes on writing into its last block; the new row copies that block before it does. The source's ring no
        longer turns by itself, since its pages are shared now.
        """
        assert not self._steady[row] and not self._promises.get(source)
        self.settle(source, n)
        self.table[row], self._ring[row] = self.table[source], self._ring[source]
        self._owned[row] = False
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

    def disturb(self, row: int, n: int) -> None:
        """Pages of this row were shared: its ring may no longer turn on its own."""
        self.settle(row, n)
        self._schedule_event(row, n)

    def clear(self, row: int) -> np.ndarray:
        """Forget a row; returns every page it held, for the caller to release."""
        pages = self.held_pages(row)
        self._promises.pop(row, None)
        self.table[row], self._owned[row], self._ring[row] = NO_PAGE, False, -1
        self._steady[row], self.next_event[row], self._to_copy[row] = False, 0, 0
        self._spans.pop(row, None)
        return pages

    def held_pages(self, row: int) -> np.ndarray:
        """Every page a row has a reference on, checkpoints' included; once per reference."""
        promised = [promise.pages for promise in self._promises.get(row, {}).values()]
        return np.concatenate([self.table[row][self.table[row] != NO_PAGE], *promised])

    def num_blocks(self, row: int) -> int:
        """Blocks in the table."""
        return int(np.count_nonzero(self.table[row] != NO_PAGE))

    def missing(self, rows: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Pages that rows will still ask for on their way to ``pages`` blocks, that of a shared block to be copied included."""
        if self._fixed is None:
            held = np.count_nonzero(self.table[rows] != NO_PAGE, axis=1)
            return np.maximum(0, pages - held) + self._to_copy[rows]
        return np.maximum(0, pages - np.count_nonzero(self._owned[rows], axis=1))

    def num_held(self, row: int) -> int:
        """Different pages that the row has references on."""
        return len(np.unique(self.held_pages(row)))

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.table)
        for span in self._spans.values():
            moved.apply(span.pages)
            moved.apply(span.past)
        for promises in self._promises.values():
            for promise in promises.values():
                moved.apply(promise.pages)

    # -- the step plan -----------------------------------------------------------------------------------------------------

    def group_step(self, rows: np.ndarray, start: np.ndarray, query_start: np.ndarray) -> GroupStep:
        """This group's part of the step whose spans were applied since the last call; R rows, T tokens in all."""
        fresh = np.full(len(rows), self.law.reads_before_writing)
        column = self._columns(start // self._block)
        column = np.minimum(column, self.table.shape[1] - 1)
        total = int(query_start[-1])
        pages, places = np.empty(total, np.int32), np.empty(total, np.int32)
        pages[query_start[:-1]] = self.table[rows, column]
        places[query_start[:-1]] = start % self._block
        live = self._fixed is None
        table = self.table if live else self.table[rows]
        for index in [i for i, row in enumerate(rows.tolist()) if row in self._spans] if self._spans else ():
            span = self._spans[int(rows[index])]
            fresh[index] = span.plan.fresh
            part = slice(int(query_start[index]), int(query_start[index + 1]))
            pages[part], places[part] = self._placed(span)
            if span.plan.fresh and not live:
                table[index] = span.past
        self._spans.clear()
        return GroupStep(
            table=table, rows=rows.astype(np.int32) if live else np.arange(len(rows), dtype=np.int32), fixed=self._fixed,
            turning=self._turning, block_tokens=self._block, fresh=fresh, write_page=pages, write_row=places,
        )  # fmt: skip

    def _placed(self, span: _Span) -> tuple[np.ndarray, np.ndarray]:
        """Page and row of every token of a span; NO_PAGE where it is not stored."""
        positions = np.arange(span.plan.start, span.plan.stop)
        blocks = positions // self._block
        if not len(span.pages):
            return np.full(len(positions), NO_PAGE, np.int32), (positions % self._block).astype(np.int32)
        at = np.minimum(np.searchsorted(span.plan.blocks, blocks), len(span.pages) - 1)
        stored = (span.plan.blocks[at] == blocks) & (positions >= span.plan.write_from)
        return np.where(stored, span.pages[at], NO_PAGE).astype(np.int32), (positions % self._block).astype(np.int32)
