"""The published part of running requests.

Owns ``Chains``: for every row the index nodes of what it has in common with the prefix index, and
the pages that it holds for them beside its tables. A running request holds every growing page on
its chain, also those that its own table does not need: so nothing that cannot be evicted counts as
cached, and admission stays exact. Knows index, pool and tables; knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.block_plan import Promise, blocks_in
from octavo.cache.hits import Grain
from octavo.cache.index.tree import ROOT, Claim, PrefixIndex
from octavo.cache.tables import AppendTable, GroupTable
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap


class _Chain:
    """One row's nodes, root first, and by growing group the pages it holds for them elsewhere."""

    def __init__(self, nodes: np.ndarray, groups: Sequence[int]) -> None:
        self.nodes = nodes
        self.extra: dict[int, set[int]] = {group: set() for group in groups}


class Chains:
    """Of all running rows. tables: of all groups. unit: tokens of a node."""

    def __init__(
        self,
        index: PrefixIndex,
        pool: PagePool,
        tables: Sequence[GroupTable],
        appends: Mapping[int, AppendTable],
        grains: Sequence[Grain],
        *,
        unit: int,
    ) -> None:
        self._index, self._pool, self._tables, self._appends = index, pool, tables, appends
        self._grains, self._unit = grains, unit
        self._bounded = [group for group in range(len(tables)) if group not in appends]
        self._chains: dict[int, _Chain] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._chains

    def __iter__(self) -> Iterator[int]:
        return iter(self._chains)

    # -- questions ---------------------------------------------------------------------------------

    def nodes(self, row: int) -> np.ndarray:
        """Nodes of a row, root first."""
        return self._chains[row].nodes

    def last(self, row: int) -> int:
        """The node at which a row's chain ends, or ROOT."""
        nodes = self._chains[row].nodes
        return int(nodes[-1]) if len(nodes) else ROOT

    def extra(self, row: int, group: int) -> np.ndarray:
        """Pages (int32, ascending) that a row holds for its chain beside its table."""
        return _pages(self._chains[row].extra.get(group, ()))

    def unheld(self, group: int, nodes: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Pages (int32, ascending) that nodes, the first ones of a chain, have in other places than
        ``table``, the pages of the blocks of one row.
        """
        return _pages(self._others(group, nodes, 0, table))

    def _others(self, group: int, nodes: np.ndarray, first: int, table: np.ndarray) -> set[int]:
        """Pages of nodes, from unit ``first`` on, of a growing group that are not in the table."""
        grain = self._grains[group]
        grains = np.arange(first * grain.per_unit, (first + len(nodes)) * grain.per_unit)
        blocks = grains * grain.tokens // self._tables[group].layout.block_tokens
        at = np.minimum(blocks, len(table) - 1)
        pages = self._index.pages[grain.rows][:, nodes].T.reshape(-1)
        other = pages[(at != blocks) | (pages != table[at])] if len(table) else pages
        return set(other.tolist())

    # -- beginning and ending ----------------------------------------------------------------------

    def begin(self, row: int, nodes: np.ndarray) -> None:
        """A row, whose tables have been filled, stands on nodes that were found."""
        assert row not in self._chains
        self._chains[row] = _Chain(nodes, list(self._appends))
        for group in self._appends if len(nodes) else ():
            self.hold(row, group, nodes, 0)
        self._index.enter(self.last(row))

    def fork(self, source: int, row: int) -> None:
        """Another row, whose tables have been filled, stands where ``source`` does."""
        chain = self._chains[row] = _Chain(self._chains[source].nodes, list(self._appends))
        for group, pages in self._chains[source].extra.items():
            chain.extra[group] = set(pages)
            self._pool.retain(_pages(pages))
        self._index.enter(self.last(row))

    def hold(self, row: int, group: int, nodes: np.ndarray, first: int) -> None:
        """Hold what nodes, from unit ``first`` on, have in other pages than the row's table."""
        extra = self._chains[row].extra[group]
        more = self._others(group, nodes, first, self._appends[group].table[row]) - extra
        self._pool.retain(_pages(more))
        extra |= more

    def hold_all(self, row: int, group: int) -> None:
        """``hold`` for the whole chain, after the row's table has got another page."""
        self.hold(row, group, self._chains[row].nodes, 0)

    def touch(self, row: int, *, resumed: int | None = None) -> None:
        """Note that a row's chain has just been of use. resumed: units after which the row, which
        has found it, goes on.
        """
        self._index.touch(self._chains[row].nodes, resumed=resumed)

    def end(self, row: int) -> dict[int, np.ndarray]:
        """A row leaves its chain; returns by group the pages held for it, to be released."""
        chain = self._chains.pop(row)
        return {group: _pages(pages) for group, pages in chain.extra.items()}

    def leave(self, nodes: np.ndarray) -> None:
        """Nobody is at the end of these nodes any more: rank what can be let go there anew."""
        if len(nodes):
            self._index.leave(int(nodes[-1]))
            self._index.offer_chain(nodes)

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, row: int, keys: np.ndarray, step: int | None) -> None:
        """Put the units ``keys[published:]``, all computed and received, into the index; share what
        others put there first. Pages given up wait for ``step``'s receipt.
        """
        chain = self._chains[row]
        published = len(chain.nodes)
        found = self._index.match(keys, published)
        if len(found):
            self._stand_at(row, found)
            for unit, node in enumerate(found.tolist(), published):
                self._share(row, unit, node, step)
        if len(chain.nodes) < len(keys):
            self._stand_at(row, self._insert(row, keys, len(chain.nodes)))
        assert len(chain.nodes) >= len(keys), "all of it is published"

    def _stand_at(self, row: int, nodes: np.ndarray) -> None:
        """A row's chain goes on over ``nodes``."""
        self._index.enter(int(nodes[-1]))
        self._index.leave(self.last(row))
        self._chains[row].nodes = np.concatenate([self._chains[row].nodes, nodes])

    def _insert(self, row: int, keys: np.ndarray, first: int) -> np.ndarray:
        lanes, stop = [], len(keys)
        for group, table in self._appends.items():
            grain = self._grains[group]
            grains = np.arange(first * grain.per_unit, stop * grain.per_unit)
            pages = table.table[row, grains * grain.tokens // table.layout.block_tokens]
            lanes.append(pages.reshape(stop - first, grain.per_unit).T)
        pages = np.concatenate(lanes) if lanes else np.zeros((0, stop - first), np.int32)
        return self._index.insert(self.last(row), keys[first:], pages)

    def _share(self, row: int, unit: int, node: int, step: int | None) -> None:
        """Another request published this unit first: hold its pages, and stand on them once a whole
        block is there.
        """
        for group, table in self._appends.items():
            self.hold(row, group, np.array([node]), unit)
            grain, block_tokens = self._grains[group], table.layout.block_tokens
            for lane in grain.lanes:
                stop = unit * self._unit + (lane - grain.lanes.start + 1) * grain.tokens
                page = int(self._index.pages[lane, node])
                if stop % block_tokens == 0 and page in self._chains[row].extra[group]:
                    self._stand_on(row, group, stop // block_tokens - 1, page, step)

    def _stand_on(self, row: int, group: int, block: int, page: int, step: int | None) -> None:
        """Trade the row's own page of a block for the equal one that the index has."""
        extra = self._chains[row].extra[group]
        extra.discard(page)
        own = self._appends[group].swap(row, block, page)
        if self._pool.uses(own)[0]:
            extra.add(own)
        else:
            self._pool.release(own, step)

    def claim(self, row: int, n: int, promises: Mapping[int, Promise]) -> None:
        """Make the chain's node at ``n`` tokens a resume point that keeps what was promised."""
        nodes = self._chains[row].nodes
        node = int(nodes[n // self._unit - 1])
        if self._index.is_resume_point(node):
            return
        parts = [self._claim_of(group, n, promises[group], nodes) for group in self._bounded]
        self._index.claim(
            node,
            Claim(
                lanes=np.concatenate([part.lanes for part in parts]),
                nodes=np.concatenate([part.nodes for part in parts]),
                pages=np.concatenate([part.pages for part in parts]),
            ),
        )
        assert self._index.is_resume_point(node)

    def _claim_of(self, group: int, n: int, promise: Promise, nodes: np.ndarray) -> Claim:
        grain, table = self._grains[group], self._tables[group]
        grains = blocks_in(table.law.needs(n), grain.tokens)
        blocks = grains * grain.tokens // table.layout.block_tokens
        pages = promise.pages[np.searchsorted(promise.blocks, blocks)]
        units = grains * grain.tokens // self._unit
        return Claim(
            lanes=grain.lane(grains).astype(np.int32),
            nodes=nodes[units],
            pages=pages.astype(np.int32),
        )

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        for chain in self._chains.values():
            for group, extra in chain.extra.items():
                pages = _pages(extra)
                moved.apply(pages)
                chain.extra[group] = set(pages.tolist())

    def check(self, row: int) -> None:
        """Assert what must hold of a row, from scratch: every growing page on its chain is held."""
        chain = self._chains[row]
        for group, table in self._appends.items():
            others = self._others(group, chain.nodes, 0, table.table[row])
            assert others <= chain.extra[group], "a chain's pages are held"
            assert NO_PAGE not in chain.extra[group]


def _pages(pages: Sequence[int] | set[int] | tuple[()]) -> np.ndarray:
    return np.array(sorted(pages), np.int32)
