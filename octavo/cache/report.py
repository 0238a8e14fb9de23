"""What a cache says about itself: why a prefix hit was what it was, and what a request held.

Owns plain records and their wording. Computes nothing that the managers do not hand in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """What one request held of one group. ``uniform_bytes``: what its layers would hold if they
    never let go.
    """

    law: str
    layers: tuple[int, ...]
    block_tokens: int
    blocks: int
    bytes: int
    uniform_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What one request of ``tokens`` computed tokens held, ``cached_tokens`` of them found rather
    than computed.

    peak_bytes: most bytes it held at any step, steps' transients included.
    """

    tokens: int
    cached_tokens: int
    groups: tuple[GroupReport, ...]
    peak_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes held over all groups."""
        return sum(group.bytes for group in self.groups)

    @property
    def uniform_bytes(self) -> int:
        """Bytes of one uniform cache, every layer kept in full."""
        return sum(group.uniform_bytes for group in self.groups)


class MissCause(StrEnum):
    """Why a hit was no longer than it was: ``none`` where everything that may be reused was."""

    NONE = "none"
    OFF = "off"
    NO_CHECKPOINT = "no_checkpoint"
    EVICTED = "evicted"
    NEVER_CACHED = "never_cached"


@dataclass(frozen=True, kw_only=True)
class HitExplanation:
    """Why a prompt of ``prompt_tokens`` hit ``hit_tokens``.

    matched_tokens: longest prefix that the growing groups have. reach: tokens that every group
    alone would have allowed, by the group's law. limited_by: laws of the groups that lowered the
    hit. cause: one word. reason: one sentence.
    """

    prompt_tokens: int
    hit_tokens: int
    matched_tokens: int
    reach: tuple[tuple[str, int], ...]
    limited_by: tuple[str, ...]
    cause: MissCause
    reason: str
