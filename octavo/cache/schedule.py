"""When decoding must ask the cache: what follows from the tables, kept for speed.

Owns ``DecodeSchedule``. For every row it knows the first token at which anything must be asked, and
for every group and row the first one at which the group needs more than the next row of a page that
it has. Before those, a step costs one comparison. Nothing here is true by itself: without it
(``forget`` before every step) the same pages are taken, only later in the day; ``check`` holds it
to the tables.

Knows groups, their laws and their tables; knows no requests, no index and no checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.cache.block_plan import NEVER, BlockPlan
from octavo.cache.tables import AppendTable, Rings, TurnPlan


class DecodeSchedule:
    """Of ``rows`` rows. appends: the growing groups' tables by group. rings: all others;
    ring_group: each one's group.
    """

    def __init__(
        self,
        appends: dict[int, AppendTable],
        rings: Rings,
        ring_group: Sequence[int],
        *,
        rows: int,
    ) -> None:
        self._appends, self._rings = appends, rings
        self._ring_group = np.array(ring_group, np.int64)
        self._ring_of = {group: ring for ring, group in enumerate(ring_group)}
        groups = len(appends) + len(ring_group)
        # First token at which a group must be asked, [groups, rows]; and at which anything must.
        self._event = np.zeros((groups, rows), np.int64)
        self._due = np.zeros(rows, np.int64)
        self._fixed = np.array([layout.fixed or 0 for layout in rings.layouts], np.int64)
        self._turning = np.array([layout.turning for layout in rings.layouts], np.int64)
        self._releases = np.array(
            [layout.group.law.next_release(0) is not None for layout in rings.layouts], bool
        )
        self._reads_first = np.array(
            [layout.group.law.reads_before_writing for layout in rings.layouts], bool
        )
        # Rings that turn by themselves: every column has a page that nobody else uses.
        self._steady = np.zeros((groups, rows), bool)
        # Token from which on a ring turns by itself, unless it is disturbed again: by then a block
        # has entered every column, into a page of the row's own.
        self._whole_at = np.zeros((groups, rows), np.int64)

    # -- questions ---------------------------------------------------------------------------------

    def due(self, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Bool [R]: must anything be asked before token ``n`` of these rows is computed?"""
        return self._due[rows] <= n

    def groups_due(self, rows: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Bool [groups, R]: which groups must be asked before token ``n``?"""
        return self._event[:, rows] <= n

    def steady(self, group: int, row: int) -> bool:
        """Is every column of the row's ring known to hold a page that nobody else uses?"""
        return bool(self._steady[group, row])

    # -- what happens to rows ----------------------------------------------------------------------

    def invalidate(self, row: int, n: int) -> None:
        """Whatever is known of a row with ``n`` planned tokens may be wrong now."""
        self._event[:, row] = self._due[row] = n
        for group in self._ring_group.tolist():
            self._shared(group, row, n)

    def ask(self, row: int, n: int) -> None:
        """A row with ``n`` planned tokens must be looked at before its next token."""
        self._due[row] = n

    def disturb(self, row: int, n: int) -> None:
        """Pages of a row with ``n`` planned tokens have got another user: no ring turns by
        itself.
        """
        steady = self._steady[:, row]
        self._event[steady, row] = np.minimum(self._event[steady, row], n)
        self._due[row] = n
        for group in self._ring_group.tolist():
            self._shared(group, row, n)

    def _shared(self, group: int, rows: np.ndarray | int, n: np.ndarray | int) -> None:
        """Any page of a ring of rows with ``n`` planned tokens may have another user."""
        layout = self._rings.layouts[self._ring_of[group]]
        behind = np.maximum(-(-n // layout.block_tokens), layout.fixed or 0)
        self._steady[group, rows] = False
        self._whole_at[group, rows] = (behind + layout.turning - 1) * layout.block_tokens

    def extended(self, group: int, plan: BlockPlan) -> None:
        """A chunk has been carried out. A ring that it wrote from end to end is steady, unless a
        checkpoint keeps some of its pages.
        """
        self._event[group, plan.row] = self._due[plan.row] = plan.stop
        if group in self._ring_of:
            self._shared(group, plan.row, plan.stop)
            self._steady[group, plan.row] = plan.refills and not plan.promised

    def appended(self, group: int, rows: np.ndarray, n: np.ndarray) -> None:
        """Token ``n`` of rows has its page in a growing group, and so has the rest of its block."""
        table = self._appends[group]
        self._event[group, rows] = _next_block(n, table.layout.block_tokens)

    def turned(self, plan: TurnPlan) -> None:
        """Rings have turned."""
        group = self._ring_group[plan.ring]
        busy = _next_block(plan.n, self._rings.block[plan.ring])
        self._event[group, plan.row] = np.where(self._reads_first[plan.ring], plan.n + 1, busy)
        self._steady[group, plan.row] = False
        whole = plan.n >= self._whole_at[group, plan.row]
        if self._releases.any():
            # Pages that were handed back are missing: that is asked, not counted.
            whole &= ~self._releases[plan.ring]
            asked = np.flatnonzero(self._releases[plan.ring] & plan.fills & ~plan.takes)
            whole[asked] = self._rings.alone(plan.row[asked])[
                np.arange(len(asked)), plan.ring[asked]
            ]
        steady = np.flatnonzero(whole)
        if len(steady):
            self._steady[group[steady], plan.row[steady]] = True
            self._event[group[steady], plan.row[steady]] = NEVER
        for ring in np.flatnonzero(self._releases).tolist():
            mine = np.flatnonzero(plan.ring == ring)
            release = self._rings.layouts[ring].group.law.next_release(plan.n[mine])
            assert release is not None
            number, rows = int(self._ring_group[ring]), plan.row[mine]
            self._event[number, rows] = np.minimum(self._event[number, rows], release)

    def rolled(self, groups: np.ndarray, rows: np.ndarray, n: np.ndarray) -> None:
        """What rows with ``n`` tokens have in bounded groups may be a checkpoint's now, too."""
        rings = np.searchsorted(self._ring_group, groups)[:, None]
        size = self._rings.block[rings]
        behind = np.maximum(-(-n // size), self._fixed[rings])
        self._steady[groups[:, None], rows] = False
        self._whole_at[groups[:, None], rows] = (behind + self._turning[rings] - 1) * size

    def traded(self, group: int, rows: np.ndarray) -> None:
        """Rings of one page have got one that nobody else uses."""
        self._steady[group, rows], self._event[group, rows] = True, NEVER

    def look_ahead(self, rows: np.ndarray, limit: np.ndarray) -> None:
        """Note when rows need the cache next: at their groups' first event, or at ``limit``."""
        self._due[rows] = np.minimum(np.minimum.reduce(self._event[:, rows]), limit)

    # -- check -------------------------------------------------------------------------------------

    def check(self, row: int, n: int) -> None:
        """Assert, from the tables, that a row with ``n`` planned tokens is asked in time."""
        assert self._event.shape == self._steady.shape == self._whole_at.shape
        assert len(self._due) == self._event.shape[1]
        for group, table in self._appends.items():
            if (event := int(self._event[group, row])) > n:
                last = (event - 1) // table.layout.block_tokens
                assert last < table.filled[row] and table.owned[row, last], "its block is there"
        for ring, group in enumerate(self._ring_group.tolist()):
            layout, event = self._rings.layouts[ring], int(self._event[group, row])
            alone = bool(self._rings.alone(np.array([row]))[0, ring])
            assert alone or not self._steady[group, row], "a steady ring has its pages to itself"
            if event > n and not self._steady[group, row]:
                assert event <= _next_block(n - 1, layout.block_tokens), "asked at the next block"
                columns = self._rings.columns_at(np.array([n]))[ring]
                assert self._rings.owned[row, columns].all(), "writes into pages of its own"


def _next_block(n: np.ndarray | int, block_tokens: int) -> np.ndarray | int:
    """First token behind the block of token ``n``."""
    return (n // block_tokens + 1) * block_tokens
