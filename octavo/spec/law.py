"""How long things are remembered: one law per stream.

Owns ``needs(n)``, the only question the rest of octavo asks about lifetime. Knows no kinds, no
bytes, no blocks. Everything
else follows from it: what may be freed (all outside ``needs(n)``), what a step must write (the
union of ``needs(m)`` over its end and its checkpoints), what a resume point keeps, what a transfer
moves.

A law keeps ``prefix`` tokens at the front for ever and, behind them, ``[first(n), n)``. Every law
obeys *no resurrection*: a token that ``needs(n)`` leaves out is never asked for by ``needs(n +
1)``, unless it is the token ``n`` just computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

import numpy as np

from octavo.base import ConfigError, Interval

Count = TypeVar("Count", int, np.ndarray)


@dataclass(frozen=True)
class Law(ABC):
    """A rule of remembering. Subclasses are frozen and compare by value, so equal laws share a
    group.
    """

    def needs(self, n: int) -> tuple[Interval, ...]:
        """Token intervals whose entries must be resident to compute token ``n``. Ascending,
        disjoint, none empty.
        """
        if n <= 0:
            return ()
        prefix = min(self.prefix or 0, n)
        start = max(self.first(n), 0)
        if start <= prefix:
            return ((0 if prefix else start, n),)
        front = ((0, prefix),) if prefix else ()
        return (*front, (start, n)) if start < n else front

    @abstractmethod
    def first(self, n: Count) -> Count:
        """First token needed behind the prefix; may be negative or at most ``n``. Integer or array
        in, the same out.
        """

    @property
    def prefix(self) -> int | None:
        """Tokens at the front that are never let go; None where that is all of them."""
        return 0

    @property
    @abstractmethod
    def span(self) -> int:
        """Most tokens that ``needs(n)`` keeps behind its prefix, the token ``n`` itself included. 0
        for an unbounded law.
        """

    @property
    def alignment(self) -> int:
        """What every ``first(n)`` is a multiple of."""
        return 1

    @property
    def reads_before_writing(self) -> bool:
        """True where even a single token replaces what it reads, so one page serves as past and as
        result.
        """
        return False

    def next_release(self, n: Count) -> Count | None:
        """First ``m > n`` at which so much is let go at once that it should be handed back; None
        where a ring may keep it.

        Integer or array in, the same out; None for every n or for none.
        """
        return None

    @abstractmethod
    def describe(self) -> str:
        """A few words for tables."""


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class Everything(Law):
    """Full attention, MLA latents, compressed entries: nothing is ever let go."""

    def first(self, n: Count) -> Count:
        return n * 0

    @property
    def prefix(self) -> None:
        return None

    @property
    def span(self) -> int:
        return 0

    def describe(self) -> str:
        return "everything"


@dataclass(frozen=True)
class Window(Law):
    """Sliding-window attention: token n sees the last ``window`` tokens, itself included."""

    window: int

    def __post_init__(self) -> None:
        _positive("window", self.window)

    def first(self, n: Count) -> Count:
        return n - self.window + 1

    @property
    def span(self) -> int:
        return self.window

    def describe(self) -> str:
        return f"window {self.window}"


@dataclass(frozen=True)
class Chunk(Law):
    """Chunked local attention: token n sees its own aligned chunk; at a border the whole old chunk
    is dead.
    """

    chunk: int

    def __post_init__(self) -> None:
        _positive("chunk", self.chunk)

    def first(self, n: Count) -> Count:
        return n - n % self.chunk

    @property
    def span(self) -> int:
        return self.chunk

    @property
    def alignment(self) -> int:
        return self.chunk

    def next_release(self, n: Count) -> Count:
        return n - n % self.chunk + self.chunk

    def describe(self) -> str:
        return f"chunk {self.chunk}"


@dataclass(frozen=True)
class SinkWindow(Law):
    """The first ``sinks`` tokens for ever, and a window behind the current one."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        _positive("sinks", self.sinks)
        _positive("window", self.window)

    def first(self, n: Count) -> Count:
        return n - self.window + 1

    @property
    def prefix(self) -> int:
        return self.sinks

    @property
    def span(self) -> int:
        return self.window

    def describe(self) -> str:
        return f"{self.sinks} sinks + window {self.window}"


@dataclass(frozen=True)
class Tail(Law):
    """A compressor's rolling state: the open group of ``ratio`` tokens and ``overlap`` tokens
    before it.
    """

    ratio: int
    overlap: int = 0

    def __post_init__(self) -> None:
        _positive("ratio", self.ratio)
        if self.overlap < 0:
            raise ConfigError(f"overlap must not be negative, not {self.overlap}")

    def first(self, n: Count) -> Count:
        return n // self.ratio * self.ratio - self.overlap

    @property
    def span(self) -> int:
        return self.ratio + self.overlap

    @property
    def alignment(self) -> int:
        return gcd(self.ratio, self.overlap)

    def describe(self) -> str:
        return f"tail {self.ratio}+{self.overlap}"


@dataclass(frozen=True)
class Snapshot(Law):
    """A recurrent state. Its entry for token ``n - 1`` is the state after exactly ``n`` tokens;
    only the newest is needed.
    """

    def first(self, n: Count) -> Count:
        return n - 1

    @property
    def span(self) -> int:
        return 1

    @property
    def reads_before_writing(self) -> bool:
        return True

    def describe(self) -> str:
        return "snapshot"
