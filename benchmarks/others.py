"""How much of the processor others had while something was measured: other processes, and other
guests of a shared machine.

Owns the reading of Linux's counters; knows nothing of what is measured.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PROC = Path("/proc")


class Others:
    """Counts from its making on, for the processes of one session."""

    def __init__(self, session: int, proc: Path = PROC) -> None:
        self._session, self._proc = session, proc
        self._began, self._before = time.perf_counter(), self._ticks()

    def share(self) -> float | None:
        """The part of all cores' time, 0 to 1, that went to others until now; None where the system
        does not tell.

        A process of the session that ended meanwhile counts as one of the others.
        """
        now = self._ticks()
        if now is None or self._before is None:
            return None
        ticks = (
            (time.perf_counter() - self._began) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        )
        return max(0.0, (now - self._before) / ticks) if ticks else None

    def _ticks(self) -> int | None:
        """Busy and stolen ticks of all cores, less those of the session."""
        try:
            user, nice, system, _, _, irq, soft, steal = map(
                int, (self._proc / "stat").read_text().split()[1:9]
            )
        except (OSError, ValueError):
            return None
        return (
            user
            + nice
            + system
            + irq
            + soft
            + steal
            - sum(map(self._own, self._proc.glob("[0-9]*/stat")))
        )

    def _own(self, stat: Path) -> int:
        """User and system ticks of one process, 0 where it is not of the session."""
        try:
            # What follows the name, which may hold blanks; man 5 proc has the order.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12]) if int(fields[3]) == self._session else 0
