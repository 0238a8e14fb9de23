"""What one step asks of the tables of one group: plain records between planning and carrying out.

Knows blocks, columns and pages of one group; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import Interval, blocks_of, ceil_div

NEVER = int(np.iinfo(np.int64).max)
"""A position that no request reaches."""


def blocks_in(intervals: Sequence[Interval], block_tokens: int) -> np.ndarray:
    """Blocks (int64, ascending, no repeats) that hold any token of ascending, disjoint intervals."""
    if len(intervals) == 1:
        return np.arange(intervals[0][0] // block_tokens, ceil_div(intervals[0][1], block_tokens))
    return np.array(blocks_of(intervals, block_tokens), np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPlan:
    """What tokens ``[start, stop)`` of one request ask of one group. Made by ``plan``, carried out by ``apply``.

    fresh: past is read from pages, the step's own entries are not (``GroupStep.fresh``).
    write_from: first token that is stored; those before it lie in shared pages already.
    blocks: blocks written, ascending. new: those that need a page. copied: those of new whose older rows must come along.
    Of groups that let go, besides: stays: blocks the table holds afterwards. held: those it holds now, and their columns.
    recycled: columns whose page becomes a new block's. promised: for every checkpoint its blocks.
    """

    row: int
    start: int
    stop: int
    fresh: bool
    write_from: int
    blocks: Sequence[int]
    new: Sequence[int]
    copied: Sequence[int]
    stays: set[int]
    held: dict[int, int]
    recycled: Sequence[int]
    promised: dict[int, list[int]]

    @property
    def wanted(self) -> int:
        """Pages to be allocated."""
        return len(self.new) - len(self.recycled)


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnPlan:
    """What one more token of several requests asks of one group. Made by ``plan_turn``, carried out by ``turn``.

    rows, n, column: [R] int64; token n's block has this column. ring: [R, turning], blocks in it now.
    fills: bool [R], the column gets a page. reuses: bool [R], the one that is there; the others' are allocated.
    """

    rows: np.ndarray
    n: np.ndarray
    column: np.ndarray
    ring: np.ndarray
    fills: np.ndarray
    reuses: np.ndarray

    @property
    def wanted(self) -> int:
        """Pages to be allocated."""
        return int(np.count_nonzero(self.fills)) - int(np.count_nonzero(self.reuses))


@dataclass(kw_only=True, eq=False)
class Span:
    """One request's part in the step being built, where it is more than one token into a page it has already."""

    plan: BlockPlan
    pages: np.ndarray
    past: np.ndarray


@dataclass(kw_only=True, eq=False)
class Promise:
    """Blocks and pages that a checkpoint keeps until its step's receipt. The pages are retained."""

    blocks: np.ndarray
    pages: np.ndarray
