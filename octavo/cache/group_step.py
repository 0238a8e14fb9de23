"""What one step reads, writes and copies, as addresses.

Owns ``GroupStep`` and ``CopyJob``, the part of a step plan that the cache decides. Knows units,
rows and tokens of one step; knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class CopyJob:
    """Copy ``units`` arena units from page ``source`` to page ``target``. Jobs run before the step,
    in order.
    """

    source: int
    target: int
    units: int


def copy_jobs(sources: Iterable[int], targets: Iterable[int], units: int) -> list[CopyJob]:
    """A job for every source and its target."""
    return [
        CopyJob(source=source, target=target, units=units)
        for source, target in zip(sources, targets, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupStep:
    """Where one group's layers read and write in one step. R requests, T tokens in all.

    Block b of request i lies at arena unit ``table[rows[i], column(b)]`` with ``column(b) = b`` for
    ``b < fixed`` and ``fixed + (b - fixed) % turning`` behind (``fixed`` is None where every block
    has its own column).

    fresh: bool [R]. False: write first, then read pages only: tokens ``[.., stop)`` are in pages.
        True: read pages for tokens before ``start`` and attend over them and the step's own fresh
        entries, then write; a page may be read as one block and written as another, so every layer
        reads all its past before it writes.
    write_page, write_row: int32 [T]. Page (unit offset) and row in its block for every token's
        entry; page -1 where the entry is not stored (it will not be needed, or a shared page holds
        it already). For streams with a stride the entry closed by a token goes to row // stride.
    """

    table: np.ndarray
    rows: np.ndarray
    fixed: int | None
    turning: int
    block_tokens: int
    fresh: np.ndarray
    write_page: np.ndarray
    write_row: np.ndarray

    def column(self, block: int) -> int:
        """Table column of a block."""
        if self.fixed is None or block < self.fixed:
            return block
        return self.fixed + (block - self.fixed) % self.turning
