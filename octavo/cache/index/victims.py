"""Candidates for eviction by rank.

Owns ``VictimQueue``: two heaps with lazy deletion, by rank and by the time until which a rank
holds. Knows nodes as numbers, ranks as floats and times as numbers that grow.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

SWEEP = 64
"""Stale entries that are never worth a sweep."""


class VictimQueue:
    """Nodes by rank: an entry that was replaced or withdrawn is skipped when it surfaces.

    Where nothing is ever taken out, because everything fits, such entries would pile up for ever:
    they are swept out once they are the larger part.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._until: list[tuple[int, int, int]] = []
        self._current: dict[int, int] = {}
        self._ticket = 0

    def put(self, node: int, rank: float, *, until: int | None = None) -> None:
        """Enter a node, or move it to a new rank, which holds before the time ``until``; None where
        it holds for good.
        """
        self._ticket += 1
        self._current[node] = self._ticket
        heappush(self._heap, (rank, self._ticket, node))
        if until is not None:
            heappush(self._until, (until, self._ticket, node))
        if max(len(self._heap), len(self._until)) > 2 * len(self._current) + SWEEP:
            self._heap = [e for e in self._heap if self._current.get(e[2]) == e[1]]
            self._until = [e for e in self._until if self._current.get(e[2]) == e[1]]
            heapify(self._heap)
            heapify(self._until)
        assert len(self._heap) >= len(self._current)

    def expired(self, now: int) -> int | None:
        """A node whose rank does not hold any longer, None where there is none. It keeps its rank,
        and is not named again before it is put again.
        """
        while self._until and self._until[0][0] <= now:
            _, ticket, node = heappop(self._until)
            if self._current.get(node) == ticket:
                return node
        return None

    def __len__(self) -> int:
        """Entries kept by rank, stale ones included; there are no more of those by time."""
        return len(self._heap)

    def __contains__(self, node: int) -> bool:
        return node in self._current

    def withdraw(self, node: int) -> None:
        """Forget a node; unknown nodes are fine."""
        self._current.pop(node, None)

    def top(self) -> float | None:
        """The lowest rank, or None where the queue is empty."""
        while self._heap:
            rank, ticket, node = self._heap[0]
            if self._current.get(node) == ticket:
                return rank
            heappop(self._heap)
        return None

    def pop(self) -> tuple[float, int] | None:
        """Take the lowest node out: its rank and the node; None where the queue is empty."""
        if self.top() is None:
            return None
        rank, _, node = heappop(self._heap)
        del self._current[node]
        return rank, node
