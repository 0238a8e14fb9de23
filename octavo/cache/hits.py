"""How far a prompt hits: the joint question of all groups to the prefix index.

Owns ``Match``, ``Grain`` and ``Hits``. Everything here is a question; nothing changes. Knows laws
through ``needs`` and ``first``, and which pages the index has; knows no tables and no requests.

The hit of the whole model is the largest number of tokens at which *every* group can go on. A group
may only lower the candidate, so the order of groups never matters. Between the hit and the longest
match of the growing groups a request recomputes tokens for the bounded groups only; the growing
ones share the pages that are there and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE, ceil_div
from octavo.cache.block_plan import blocks_in
from octavo.cache.index.tree import PrefixIndex
from octavo.cache.layout import CacheLayout

_FIRST_LOOK = 32
"""Units behind the longest match that a lookup tries first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """What the index has of a chain of keys, in hash units.

    nodes: of the longest match. hit: units at which every group can resume. reach: units each group
    alone would allow.
    """

    nodes: np.ndarray
    hit: int
    reach: tuple[int, ...]

    @property
    def matched(self) -> int:
        """Units of the longest match."""
        return len(self.nodes)


EMPTY = Match(nodes=np.zeros(0, np.int32), hit=0, reach=())
"""What is found where nothing is looked for."""


@dataclass(frozen=True, kw_only=True)
class Grain:
    """How one group's blocks and the index's units nest.

    tokens: the smaller of block and unit. per_unit: grains in a unit. lanes: index lanes of the
        group, for the last grains of a unit (a law with a short memory never claims the first
        ones).
    """

    tokens: int
    per_unit: int
    lanes: range

    @property
    def rows(self) -> slice:
        """``lanes`` as an index that copies nothing."""
        return slice(self.lanes.start, self.lanes.stop)

    def lane(self, grain: np.ndarray) -> np.ndarray:
        """Index lane of grains, counted from token 0."""
        return grain % self.per_unit - (self.per_unit - len(self.lanes)) + self.lanes.start


def grains_of(layout: CacheLayout) -> tuple[Grain, ...]:
    """The grains of all groups, their lanes one after another."""
    grains, lane = [], 0
    for group in layout.groups:
        tokens = min(group.block_tokens, layout.hash_unit)
        per_unit, law = layout.hash_unit // tokens, group.group.law
        short = law.prefix == 0 and law.span <= layout.hash_unit
        lanes = min(per_unit, ceil_div(law.span, tokens)) if short else per_unit
        grains.append(Grain(tokens=tokens, per_unit=per_unit, lanes=range(lane, lane + lanes)))
        lane += lanes
    return tuple(grains)


class Hits:
    """Questions about one index on behalf of all groups of a layout."""

    def __init__(self, layout: CacheLayout, grains: tuple[Grain, ...], index: PrefixIndex) -> None:
        self._layout, self._grains, self._index = layout, grains, index
        self._unit = layout.hash_unit
        self._bounded = [
            number
            for number, group in enumerate(layout.groups)
            if group.group.law.prefix is not None
        ]

    def lookup(self, keys: np.ndarray, limit: int) -> Match:
        """Match a chain; the hit is at most ``limit`` units.

        Lengths are tried from the longest down, ever more at a time: the nearer the resume point,
        the less is looked at.
        """
        nodes = self._index.match(keys)
        stop = hit = min(limit, len(nodes))
        reach, width = dict.fromkeys(range(len(self._layout.groups)), len(nodes)), _FIRST_LOOK
        # What a resume point claims is whole: nothing needs to be looked at.
        ends_well = not stop or self._index.is_resume_point(int(nodes[stop - 1]))
        if ends_well:
            reach |= dict.fromkeys(self._bounded, stop)
        open_groups = set() if ends_well else set(self._bounded)
        while open_groups:
            low = max(0, stop - width)
            good = np.ones(stop - low + 1, bool)
            for group in self._bounded:
                able = self.resumable(group, nodes, low, stop)
                good &= able
                if group in open_groups and able.any():
                    reach[group] = low + int(np.flatnonzero(able)[-1])
                    open_groups.discard(group)
            if good.any():
                hit = low + int(np.flatnonzero(good)[-1])
                break
            stop, width = low - 1, 4 * width
        return Match(nodes=nodes, hit=hit, reach=tuple(reach.values()))

    def resumable(self, group: int, nodes: np.ndarray, low: int, stop: int) -> np.ndarray:
        """Bool: can this bounded group go on after ``low`` to ``stop`` units? True at 0."""
        grain, law = self._grains[group], self._layout.groups[group].group.law
        n = np.arange(low, stop + 1) * self._unit
        front = np.minimum(law.prefix or 0, n)
        start = np.minimum(np.maximum(law.first(n), front), n)
        base = int(start.min()) // self._unit
        missing, offset = self._missing(group, nodes[base:stop]), base * grain.per_unit
        ends, starts = n // grain.tokens - offset, start // grain.tokens - offset
        able = missing[ends] - missing[np.where(start < n, starts, ends)] == 0
        if law.prefix:
            whole = self._missing(group, nodes[: ceil_div(int(front[-1]), self._unit)])
            able &= whole[-(-front // grain.tokens)] == 0
        return np.asarray(able)

    def _missing(self, group: int, nodes: np.ndarray) -> np.ndarray:
        """Of the grains of nodes, how many before each one are not there: [grains + 1]."""
        grain = self._grains[group]
        absent = np.ones((len(nodes), grain.per_unit), np.int64)
        there = self._index.pages[grain.rows][:, nodes]
        absent[:, grain.per_unit - len(grain.lanes) :] = (there == NO_PAGE).T
        return np.concatenate([[0], np.cumsum(absent.reshape(-1))])

    def needed(self, group: int, match: Match) -> tuple[np.ndarray, np.ndarray, int]:
        """What a group begins with on a match: blocks, the page of each, and tokens in them.

        Growing groups take all that matched, the others what the hit needs. A block's page is that
        of its last grain: it has the rows before it, too.
        """
        law = self._layout.groups[group].group.law
        needs = law.needs(match.hit * self._unit)
        if law.prefix is None:
            needs = ((0, match.matched * self._unit),) if match.matched else ()
        if not needs:
            return np.zeros(0, np.int64), np.zeros(0, np.int32), 0
        blocks, pages = self.pages_of(
            group, match.nodes, blocks_in(needs, self._grains[group].tokens)
        )
        return blocks, pages, needs[-1][1]

    def pages_of(
        self, group: int, nodes: np.ndarray, grains: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of grains, all there, and for each the page of its last one."""
        grain = self._grains[group]
        blocks = grains * grain.tokens // self._layout.groups[group].block_tokens
        last = np.flatnonzero(np.append(blocks[1:] != blocks[:-1], [True] * bool(len(blocks))))
        nodes = nodes[grains[last] * grain.tokens // self._unit]
        pages = self._index.pages[grain.lane(grains[last]), nodes]
        assert (pages != NO_PAGE).all(), "a hit is warm"
        return blocks[last], pages.astype(np.int32)
