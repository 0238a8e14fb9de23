"""What a step asks of the table of one group: plain records between planning and carrying out.

Knows blocks, columns and pages of one group; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        start, stop = intervals[0]
        return np.arange(start // block_tokens, ceil_div(stop, block_tokens))
    return np.array(blocks_of(intervals, block_tokens), np.int64)


NO_PAGES = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Promise:
    """What a checkpoint keeps of one group: blocks (int64) and their pages (int32)."""

    blocks: np.ndarray
    pages: np.ndarray


@dataclass(kw_only=True, eq=False)
class BlockPlan:
    """What tokens ``[start, stop)`` of one request ask of one group. Made by ``plan``, carried out
    by ``apply``.

    fresh: the past is read from pages, the step's own entries are not (``GroupStep.fresh``).
    write_from: first token that is stored; those before it lie in shared pages already.
    blocks: blocks written, ascending. new: those that need a page. copied: those of new whose
        older rows must come along.

    Of groups that let go, besides:

    stays: blocks the table holds afterwards. held: those it holds now, and their columns.
    loose: columns whose page can become a new block's if nobody else uses it.
    pages: what the loose columns hold. recycled: the loose columns whose page does become one.
    promised: for every checkpoint its blocks.
    refills: the ring is written from end to end.
    turns: the ring is written from end to end and steady, so that no page changes hands.
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


@dataclass(kw_only=True, eq=False)
class Span:
    """One request's part in the step being built, where it is more than one token into a page it
    has already.

    pages: of ``plan.blocks``. past: the row's table before the plan was carried out.
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
                first = max(block * size - plan.start, 0)
                pages[first : (block + 1) * size - plan.start] = page
        return pages, np.arange(plan.start, plan.stop, dtype=np.int32) % np.int32(size)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What carrying out a plan hands to others.

    span: addresses for the step being built. jobs: copies to be run before it.
    promised: what checkpoints keep, to be retained. gone: pages let go; until the step's receipt
    its layers, or copies, may read them.
    """

    span: Span
    jobs: Sequence[CopyJob] = ()
    promised: Mapping[int, Promise] = field(default_factory=dict)
    gone: Sequence[int] = ()
