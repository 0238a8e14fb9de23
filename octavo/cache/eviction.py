"""Which remembered prefix goes first.

Owns the order of victims and nothing else: ``PrefixIndex`` says what can go, ``KVCacheCoordinator``
says when. A policy ranks; the queue finds the lowest rank without scanning.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

SWEEP = 64
"""Stale entries that are never worth a sweep."""


class EvictionPolicy(Protocol):
    """Ranks evictable prefixes: the lowest goes first."""

    def rank(self, *, last_use: int, depth: int, hits: int) -> float:
        """Rank of a prefix ``depth`` units long, last used at logical time ``last_use``, hit
        ``hits`` times.
        """


class LeastRecentlyUsed:
    """The prefix that nobody used for longest goes first."""

    def rank(self, *, last_use: int, depth: int, hits: int) -> float:
        """The time of the last use."""
        return last_use


class VictimQueue:
    """Nodes by rank, with lazy deletion: an entry that was replaced or withdrawn is skipped when it
    surfaces.

    Where nothing is ever taken out, because everything fits, such entries would pile up for ever:
    they are swept out once they are the larger part.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._current: dict[int, int] = {}
        self._ticket = 0

    def put(self, node: int, rank: float) -> None:
        """Enter a node, or move it to a new rank."""
        self._ticket += 1
        self._current[node] = self._ticket
        heappush(self._heap, (rank, self._ticket, node))
        if len(self._heap) > 2 * len(self._current) + SWEEP:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def __len__(self) -> int:
        """Entries kept, stale ones included."""
        return len(self._heap)

    def withdraw(self, node: int) -> None:
        """Forget a node; unknown nodes are fine."""
        self._current.pop(node, None)

    def pop(self) -> int | None:
        """Take the lowest node out, or None where the queue is empty."""
        while self._heap:
            _, ticket, node = heappop(self._heap)
            if self._current.get(node) == ticket:
                del self._current[node]
                return node
        return None
