"""What one step asks of the tables of one group: plain records between planning and carrying out.

Knows blocks, columns and pages of one group; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.base import NO_PAGE, Interval, blocks_of, ceil_div
from octavo.cache.group_step import CopyJob

NEVER = int(np.iinfo(np.int64).max)
"""A position that no request reaches."""


def blocks_in(intervals: Sequence[Interval], block_tokens: int) -> np.ndarray:
    """Blocks (int64, ascending, no repeats) that hold any token of ascending, disjoint
    intervals.
    """
    if len(intervals) == 1:
        return np.arange(intervals[0][0] // block_tokens, ceil_div(intervals[0][1], block_tokens))
    return np.array(blocks_of(intervals, block_tokens), np.int64)


NO_PAGES = np.zeros(0, np.int32)


@dataclass(kw_only=True, eq=False)
class BlockPlan:
    """What tokens ``[start, stop)`` of one request ask of one group. Made by ``plan``, carried out
    by ``apply``.

    fresh: past is read from pages, the step's own entries are not (``GroupStep.fresh``).
    write_from: first token that is stored; those before it lie in shared pages already.
    blocks: blocks written, ascending. new: those that need a page. copied: those of new whose older
        rows must come along.
    Of groups that let go, besides: stays: blocks the table holds afterwards. held: those it holds
    now, and their columns.
    loose: columns whose page can become a new block's if nobody else uses it; pages: what they
        hold. recycled: those that do.
    promised: for every checkpoint its blocks. refills: the ring is written from end to end. turns:
    and it is steady, so that no page changes hands.
    """

    row: int
    start: int
    stop: int
    fresh: bool
    write_from: int
    blocks: Sequence[int]
    new: Sequence[int] = ()
    copied: Sequence[int] = ()
    stays: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)
    loose: Sequence[int] = ()
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    recycled: Sequence[int] = ()
    promised: dict[int, list[int]] = field(default_factory=dict)
    refills: bool = False
    turns: bool = False

    @property
    def wanted(self) -> int:
        """Pages to be allocated."""
        return len(self.new) - len(self.recycled)

    def recycle(self, alone: np.ndarray) -> None:
        """Complete the plan: which of ``pages`` nobody else uses (bool)."""
        self.recycled = [at for at, free in zip(self.loose, alone.tolist(), strict=True) if free]
        self.recycled = self.recycled[: len(self.new) - len(self.copied)]


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What carrying out a plan asks of others: copies to be run, pages for one more reference, and
    pages let go.

    Until the step's receipt its layers, or copies, may read what is let go.
    """

    jobs: Sequence[CopyJob] = ()
    kept: Sequence[int] = ()
    gone: Sequence[int] = ()


@dataclass(kw_only=True, eq=False)
class TurnPlan:
    """What one more token of several requests asks of one group. Made by ``plan_turn``, carried out
    by ``turn``.

    rows, n, column: [R] int64; token n's block has this column. ring: [R, turning], blocks in it
        now.
    fills: bool [R], the column gets a page. loose: bool [R], there is one that it keeps if nobody
    else uses it. reuses: bool [R], it does keep that one; the others' are allocated.
    full: bool [R] or none, rings that are steady then if nobody else uses their pages.
    pages: those the plan depends on: before ``turn`` of ``loose``, behind it of ``full``.
    """

    rows: np.ndarray
    n: np.ndarray
    column: np.ndarray
    ring: np.ndarray
    fills: np.ndarray
    loose: np.ndarray
    reuses: np.ndarray
    pages: np.ndarray
    full: np.ndarray | None = None

    @property
    def wanted(self) -> int:
        """Pages to be allocated."""
        return int(np.count_nonzero(self.fills)) - int(np.count_nonzero(self.reuses))

    def recycle(self, alone: np.ndarray) -> None:
        """Complete the plan: which of ``pages`` nobody else uses (bool)."""
        self.reuses[self.loose] = alone


@dataclass(kw_only=True, eq=False)
class Span:
    """One request's part in the step being built, where it is more than one token into a page it
    has already.
    """

    plan: BlockPlan
    pages: np.ndarray
    past: np.ndarray

    def placed(self, block_tokens: int, *, growing: bool) -> tuple[np.ndarray, np.ndarray]:
        """Page and row of every token; NO_PAGE where it is not stored. growing: every block from
        the first on has a page.
        """
        plan, size = self.plan, block_tokens
        pages = np.full(plan.stop - plan.start, NO_PAGE, np.int32)
        if growing:
            skipped = plan.write_from % size
            stored = pages[max(0, plan.write_from - plan.start) :]
            stored[:] = np.repeat(self.pages, size)[skipped : skipped + len(stored)]
        else:
            for block, page in zip(plan.blocks, self.pages.tolist(), strict=True):
                pages[max(block * size - plan.start, 0) : (block + 1) * size - plan.start] = page
        return pages, np.arange(plan.start, plan.stop, dtype=np.int32) % np.int32(size)


@dataclass(kw_only=True, eq=False)
class Promise:
    """Blocks and pages that a checkpoint keeps until its step's receipt. The pages are retained."""

    blocks: np.ndarray
    pages: np.ndarray
