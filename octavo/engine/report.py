"""What the cache held for one request, beside what one uniform cache would have held.

Owns ``CacheReport``: peaks over a request's life, in the allocator's own pages. Knows laws by their description only; imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """One group. peak_blocks, peak_bytes: most that the request held at once, whole pages.

    uniform_bytes: what the same layers hold in a cache that keeps every token of every layer, in pages of the same size.
    """

    law: str
    layers: tuple[int, ...]
    block_tokens: int
    peak_blocks: int
    peak_bytes: int
    uniform_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """All groups of one request. tokens: most that were computed; num_cached_tokens: those that a prefix hit spared."""

    groups: tuple[GroupReport, ...]
    tokens: int
    num_cached_tokens: int
    num_preemptions: int

    @property
    def peak_bytes(self) -> int:
        """Sum over the groups of the most each held."""
        return sum(group.peak_bytes for group in self.groups)

    @property
    def uniform_bytes(self) -> int:
        """What one uniform cache would have held at the end."""
        return sum(group.uniform_bytes for group in self.groups)
