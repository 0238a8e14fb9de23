"""Which remembered prefix goes first.

Owns the protocol of policies and those that come with octavo. A policy ranks; what can go, and how
much of it, is the index's to say. Knows no pages, no keys and no clock but the index's own, which
counts uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from octavo.base import ConfigError

Rank = float | np.ndarray
"""Ranks of one victim or of several."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """What could be let go together.

    now, last_use: by the index's clock, which counts uses of chains. hits: requests that found it,
    at most a few; also those before it was last evicted, if that is remembered. saved: tokens that
    a request would have to compute again without it, at least. bytes: what it keeps. plain: bytes
    that so many tokens keep in growing groups, whose entries are worth what they cost.
    """

    now: int
    last_use: int | np.ndarray
    hits: int | np.ndarray
    saved: int
    bytes: float
    plain: float


class EvictionPolicy(Protocol):
    """Ranks victims: the lowest goes first. Asked when one could be let go for the first time, when
    its last user leaves, and once more before it goes.
    """

    def rank(self, victim: Victim) -> Rank:
        """The victim's rank; an array where ``last_use`` and ``hits`` are arrays, of many that are
        alike in all else.
        """

    def evicted(self, victim: Victim) -> None:
        """It has been let go. A policy may learn from that."""


class LeastRecentlyUsed:
    """What nobody used for longest goes first."""

    def rank(self, victim: Victim) -> Rank:
        """The time of the last use."""
        return victim.last_use

    def evicted(self, victim: Victim) -> None:
        """Nothing to learn."""


class WorthItsBytes:
    """What was found before stays longer, and so does what saves much for its bytes.

    A victim is treated as if it had been used later than it was, by a multiple of the *stay*: how
    old victims are at present when they go without ever having been found. That is the time in
    which one with no hits can show that it is wanted; it follows by itself from how large the cache
    is and how fast it is filled. The multiple grows with hits, of which the first few count, and
    with tokens saved per byte, where a growing group's entries are the measure.

    Idea of the first: LRU-K and 2Q (O'Neil 1993; Johnson and Shasha 1994); of the second:
    GreedyDual-Size-Frequency (Cherkasova 1998).
    """

    hit_weight = 8.0
    """Stays by which every hit lengthens a victim's life, if it is worth its bytes."""
    first_weight = 0.5
    """Stays that a victim without hits gets likewise."""
    learning = 0.05
    """How much of the stay the latest victim decides."""

    def __init__(self) -> None:
        self._stay = 0.0

    def rank(self, victim: Victim) -> Rank:
        """The time of the last use, and what the victim has earned."""
        worth = min(1.0, victim.plain / victim.bytes) if victim.bytes else 0.0
        earned = (self.hit_weight * victim.hits + self.first_weight) * worth
        return victim.last_use + earned * self._stay

    def evicted(self, victim: Victim) -> None:
        """Learn how long victims stay."""
        if not victim.hits:
            self._stay += self.learning * (float(victim.now - victim.last_use) - self._stay)


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {"worth": WorthItsBytes, "lru": LeastRecentlyUsed}
)
"""Policies by the names that options take; the first is the default."""

DEFAULT_POLICY = next(iter(POLICIES))


def make_policy(name: str) -> EvictionPolicy:
    """A policy by its name. Raises ConfigError, with all names, for any other."""
    if name not in POLICIES:
        raise ConfigError(f"eviction {name!r} is no policy; there are {', '.join(POLICIES)}")
    return POLICIES[name]()
