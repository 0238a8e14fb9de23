"""Which remembered prefix goes first.

Owns the protocol of policies and those that come with octavo. A policy ranks; what can go, and how
much of it, is the index's to say; what the past teaches is in ``returns.py``. Knows no pages, no
keys and no clock but the index's own, which counts uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from octavo.base import ConfigError
from octavo.cache.index.returns import Returns

Rank = float | np.ndarray
"""Ranks of one victim or of several."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """What could be let go together: the end of a chain, or the claims of a resume point inside
    one.

    now, last_use, found: by the index's clock, which counts uses of chains. last_use: when a
    request last passed; found: when one last went on from there, or it came to be.
    hits: how often it had been found by then, at most a few, also before it was last evicted.
    depth: tokens up to its end. saved: tokens that a request going on from there would have to
    compute again without it, at least. bytes: what it keeps, by group; of growing groups on
    average, whatever pages others share.
    """

    now: int
    last_use: int | np.ndarray
    found: int | np.ndarray
    hits: int | np.ndarray
    depth: int
    saved: int
    bytes: tuple[float, ...]


class EvictionPolicy(Protocol):
    """Ranks victims: the lowest goes first. Asked when one could be let go for the first time, when
    its last user leaves, when a rank does not hold any longer, and once more before it goes.

    ``returns``: what has been learned of when places come back.
    """

    def rank(self, victim: Victim, returns: Returns) -> Rank:
        """The victim's rank; an array where its times and hits are arrays, of many that are alike
        in all else.
        """

    def holds_until(self, victim: Victim, returns: Returns) -> int | None:
        """The time at which its rank may be lower although nothing has happened to it, None where
        that will not be.
        """


class LeastRecentlyUsed:
    """What nobody used for longest goes first."""

    def rank(self, victim: Victim, returns: Returns) -> Rank:
        """The time of the last use."""
        return victim.last_use

    def holds_until(self, victim: Victim, returns: Returns) -> int | None:
        """For good."""
        return None


class WorthItsBytes:
    """What is expected to save least for its bytes goes first.

    A victim is worth the tokens that it would save, times how soon it should come back by what
    returns have taught for its age and hits (``Returns.worth``), for every byte that it keeps. So a
    large state with few tokens behind the resume point before it goes early, and by itself; and
    what has never been found goes, once it is older than what was found used to be.

    Tokens saved per byte: GreedyDual-Size (Cao and Irani 1997).
    """

    def rank(self, victim: Victim, returns: Returns) -> Rank:
        """Tokens saved by time and byte."""
        worth = returns.worth(victim.hits, victim.now - victim.found)
        return worth * (victim.saved / max(1.0, sum(victim.bytes)))

    def holds_until(self, victim: Victim, returns: Returns) -> int | None:
        """To the next age at which returns differ."""
        assert isinstance(victim.found, int)
        bound = returns.next_bound(victim.now - victim.found)
        return None if bound is None else victim.found + bound


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
