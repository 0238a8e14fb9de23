"""Keys that were evicted, and how often they had been found.

Owns ``Ghosts``. Knows keys and counts only.

Keys are kept in two generations. New ones enter the young one; when that has half of what may be
remembered it becomes the old one, and the old one is forgotten whole. So entering thousands of keys
is one call, and nothing is sorted by age.
"""

from __future__ import annotations

from collections.abc import Sequence


class Ghosts:
    """At most ``limit`` keys; the latest half of them is always there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, keys: Sequence[bytes], hits: Sequence[int]) -> None:
        """Remember keys with their hits, the first ones as the oldest."""
        half = self._limit // 2
        if len(keys) > half:
            keys, hits = keys[len(keys) - half :], hits[len(hits) - half :]
        if len(self._young) + len(keys) > half:
            self._old, self._young = self._young, {}
        self._young.update(zip(keys, hits, strict=True))
        assert len(self) <= self._limit

    def take(self, keys: Sequence[bytes]) -> list[int | None]:
        """Forget keys; returns the hits of each, None where it is not remembered."""
        if not self:
            return [None] * len(keys)
        young, old = self._young, self._old
        return [young.pop(key, None) if key in young else old.pop(key, None) for key in keys]

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = {}, {}
