"""The prefix index: which pages hold which prefix.

Owns a tree of *nodes*, one per hash unit of one chain, kept as arrays. A node carries one page per group (or none) and knows how
many requests end their chain on it. Knows pages and keys; knows no laws, no tokens and no requests.

Two rules make every question cheap:

- *Growing* groups (nothing is ever let go) have a page at every node, and a node goes only after its children. So presence
  along a chain is monotone, and the longest match is found by galloping.
- *Bounded* groups have pages only where a **resume point** claims them: a node at which a request can go on. A claimed page stays
  until its last claim is dropped, so a resume point that is present is whole.

The victim of an eviction is a resume tail: the nodes behind the last resume point or fork, all groups together. A resume point
inside a longer chain loses its claims only. Evicted keys stay for a while as *ghosts*, without bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.eviction import EvictionPolicy, LeastRecentlyUsed, VictimQueue
from octavo.memory.pool import PagePool

ROOT = -1
"""Parent of the first node of every chain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """Pages of one bounded group that a resume point needs: ``pages[i]`` holds unit ``nodes[i]``."""

    group: int
    nodes: np.ndarray
    pages: np.ndarray


class PrefixIndex:
    """Tree of hash units with the pages that hold them.

    bounded: for every group whether its law lets go. max_nodes, max_ghosts: bounds on bookkeeping, not on bytes.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        bounded: Sequence[bool],
        policy: EvictionPolicy | None = None,
        max_nodes: int = 1 << 22,
        max_ghosts: int = 1 << 16,
    ) -> None:
        self._pool = pool
        self._policy = policy or LeastRecentlyUsed()
        self._growing = [group for group, lets_go in enumerate(bounded) if not lets_go]
        self._bounded = [group for group, lets_go in enumerate(bounded) if lets_go]
        self._max_nodes, self._max_ghosts = max_nodes, max_ghosts
        self._node_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._claims: dict[int, tuple[Claim, ...]] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._queue = VictimQueue()
        self._free: list[int] = []
        self._clock = 0
        self.evicted_nodes = 0
        self._allocate_arrays(1024, len(bounded))

    def _allocate_arrays(self, capacity: int, groups: int) -> None:
        self._parent = np.full(capacity, ROOT, np.int32)
        self._children = np.zeros(capacity, np.int32)
        self._users = np.zeros(capacity, np.int32)
        self._depth = np.zeros(capacity, np.int32)
        self._hits = np.zeros(capacity, np.int32)
        self._last_use = np.zeros(capacity, np.int64)
        self.pages = np.full((groups, capacity), NO_PAGE, np.int32)
        self._claimed = np.zeros((groups, capacity), np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    def _grow(self) -> None:
        old = len(self._parent)
        for name in ("_parent", "_children", "_users", "_depth", "_hits", "_last_use"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.pages = np.concatenate([self.pages, np.full_like(self.pages, NO_PAGE)], axis=1)
        self._claimed = np.concatenate([self._claimed, np.zeros_like(self._claimed)], axis=1)
        self._free[:0] = range(2 * old - 1, old - 1, -1)

    def __len__(self) -> int:
        return len(self._node_of)

    @property
    def full(self) -> bool:
        """True where the bookkeeping bound asks for an eviction before the next insertion."""
        return len(self._node_of) >= self._max_nodes

    # -- questions (none of them changes anything) -------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> np.ndarray:
        """Nodes (int32) of the longest present prefix of ``keys``, by galloping."""
        known, low, step = self._node_of, 0, 1
        while low + step <= len(keys) and keys[low + step - 1] in known:
            low, step = low + step, step * 2
        high = min(low + step, len(keys) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keys[middle - 1] in known else (low, middle)
        return np.fromiter((known[key] for key in keys[:low]), np.int32, low)

    def ghost_match(self, keys: Sequence[bytes], start: int) -> int:
        """Units of ``keys`` that were present once, counted from a match of ``start`` units on."""
        units = start
        while units < len(keys) and keys[units] in self._ghosts:
            units += 1
        return units

    def find(self, key: bytes) -> int | None:
        """The node of a key, or None."""
        return self._node_of.get(key)

    def is_resume_point(self, node: int) -> bool:
        """True where a resume point's claims are held at this node."""
        return node in self._claims

    def cached_units(self) -> int:
        """Nodes present."""
        return len(self._node_of)

    # -- growing -----------------------------------------------------------------------------------------------------------

    def insert(self, parent: int, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> np.ndarray:
        """Append new nodes below ``parent`` (a node or ROOT), one chain; returns them (int32).

        pages: for every group an int32 array of one page per key (bounded groups: ignored). No key may be present.
        """
        assert all(key not in self._node_of for key in keys), "a key is inserted once"
        count = len(keys)
        while len(self._free) < count:
            self._grow()
        nodes = np.array([self._free.pop() for _ in range(count)], np.int32)
        if not count:
            return nodes
        parents = np.concatenate([[parent], nodes[:-1]]).astype(np.int32)
        depth = 0 if parent == ROOT else int(self._depth[parent])
        self._parent[nodes], self._depth[nodes] = parents, np.arange(depth + 1, depth + count + 1)
        self._children[nodes[:-1]], self._children[nodes[-1]] = 1, 0
        self._users[nodes] = self._hits[nodes] = 0
        if parent != ROOT:
            self._children[parent] += 1
            if parent not in self._claims:
                self._queue.withdraw(parent)
        listed = nodes.tolist()
        self._node_of.update(zip(keys, listed, strict=True))
        self._key_of.update(zip(listed, keys, strict=True))
        for key in keys:
            self._ghosts.pop(key, None)
        for group in self._growing:
            self.pages[group, nodes] = pages[group]
            self._pool.keep(pages[group])
        self.touch(nodes)
        return nodes

    def claim(self, node: int, claims: Sequence[Claim]) -> None:
        """Make ``node`` a resume point that needs ``claims`` (every bounded group's part; empty parts allowed)."""
        assert node not in self._claims, "a resume point is claimed once"
        for claim in claims:
            assert (claim.pages != NO_PAGE).all()
            missing = self.pages[claim.group, claim.nodes] == NO_PAGE
            assert (self._claimed[claim.group, claim.nodes][missing] == 0).all(), "a claimed unit has a page"
            self.pages[claim.group, claim.nodes[missing]] = claim.pages[missing]
            self._pool.keep(claim.pages[missing])
            self._claimed[claim.group, claim.nodes] += 1
        self._claims[node] = tuple(claims)
        self._offer(node)

    def touch(self, nodes: np.ndarray, *, hit: bool = False) -> None:
        """Note a use of a chain's nodes (root first)."""
        self._clock += 1
        self._last_use[nodes] = self._clock
        if hit:
            self._hits[nodes] += 1

    def enter(self, node: int) -> None:
        """A request's chain now ends at ``node``: it and all before it stay until ``leave``."""
        if node != ROOT:
            self._users[node] += 1

    def leave(self, node: int) -> None:
        """Undo ``enter``."""
        if node != ROOT:
            assert self._users[node] > 0
            self._users[node] -= 1
            self._offer(node)

    # -- shrinking ---------------------------------------------------------------------------------------------------------

    def offer_chain(self, nodes: np.ndarray) -> None:
        """Rank a chain's leaf and resume points anew, after its last use."""
        for node in nodes.tolist():
            if node in self._claims or self._children[node] == 0:
                self._offer(node)

    def evict(self) -> bool:
        """Let the lowest-ranked victim go. False where nothing can go (all is in use)."""
        for refreshed in (False, True):
            if refreshed:
                self._offer_all()
            while (node := self._queue.pop()) is not None:
                if self._evict_at(node):
                    return True
        return False

    def _evict_at(self, node: int) -> bool:
        if self._children[node] == 0 and self._users[node] == 0:
            self._remove_tail(node)
            return True
        if node in self._claims and self._frees_bytes(node):
            self._drop_claims(node)
            return True
        return False

    def _frees_bytes(self, node: int) -> bool:
        """Would dropping this resume point's claims free a page that nobody is using?"""
        for claim in self._claims[node]:
            last = self._claimed[claim.group, claim.nodes] == 1
            if (self._pool.references(self.pages[claim.group, claim.nodes[last]]) == 0).any():
                return True
        return False

    def _remove_tail(self, node: int) -> None:
        if node in self._claims:
            self._drop_claims(node)
        while True:
            parent = int(self._parent[node])
            self._remove_leaf(node)
            if parent == ROOT:
                return
            self._children[parent] -= 1
            if self._children[parent] or self._users[parent] or parent in self._claims or not self._bounded:
                self._offer(parent)
                return
            node = parent

    def _remove_leaf(self, node: int) -> None:
        assert self._children[node] == 0 and self._users[node] == 0
        key = self._key_of.pop(node)
        del self._node_of[key]
        self._queue.withdraw(node)
        for group in self._growing:
            self._pool.drop(self.pages[group, node : node + 1])
            self.pages[group, node] = NO_PAGE
        assert (self.pages[:, node] == NO_PAGE).all(), "a leaf has no unclaimed pages"
        self._free.append(node)
        self.evicted_nodes += 1
        self._ghosts[key] = None
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _drop_claims(self, node: int) -> None:
        for claim in self._claims.pop(node):
            self._claimed[claim.group, claim.nodes] -= 1
            loose = claim.nodes[self._claimed[claim.group, claim.nodes] == 0]
            self._pool.drop(self.pages[claim.group, loose])
            self.pages[claim.group, loose] = NO_PAGE

    def _offer(self, node: int) -> None:
        """Enter a node that could be a victim: a leaf nobody ends on, or a resume point."""
        if (self._children[node] == 0 and self._users[node] == 0) or node in self._claims:
            rank = self._policy.rank(
                last_use=int(self._last_use[node]), depth=int(self._depth[node]), hits=int(self._hits[node])
            )
            self._queue.put(node, rank)

    def _offer_all(self) -> None:
        for node in self._key_of:
            self._offer(node)

    def clear(self) -> None:
        """Forget everything that no request stands on, ghosts included."""
        while self.evict():
            pass
        self._ghosts.clear()

    def remap(self, sources: np.ndarray, targets: np.ndarray, group: int) -> None:
        """Pages of ``group`` have moved."""
        order = np.argsort(sources)
        row = self.pages[group]
        at = np.minimum(np.searchsorted(sources, row, sorter=order), len(sources) - 1)
        moved = sources[order[at]] == row
        row[moved] = targets[order[at[moved]]]

    def check(self) -> None:
        """Assert the tree's invariants from scratch."""
        live = np.array(sorted(self._key_of), np.int64)
        assert len(self._node_of) == len(live)
        counted = np.zeros_like(self._children)
        inner = live[self._parent[live] != ROOT]
        np.add.at(counted, self._parent[inner], 1)
        assert (counted[live] == self._children[live]).all(), "children are counted"
        assert np.isin(self._parent[inner], live).all(), "no orphans"
        claimed = np.zeros_like(self._claimed)
        for node, claims in self._claims.items():
            assert node in self._key_of
            for claim in claims:
                claimed[claim.group, claim.nodes] += 1
        assert (claimed == self._claimed).all(), "claims are counted"
        for group in self._growing:
            assert (self.pages[group, live] != NO_PAGE).all(), "a growing group has a page at every node"
        for group in self._bounded:
            assert ((self.pages[group] != NO_PAGE) == (self._claimed[group] > 0)).all(), "bounded pages are claimed pages"
