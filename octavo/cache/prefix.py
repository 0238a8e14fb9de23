"""The prefix index: which pages hold which prefix.

Owns a tree of *nodes*, one per hash unit of one chain, kept as arrays. A node carries one page (or
none) per *lane*: a group whose blocks are at least a hash unit long has one lane, a group with
smaller blocks one for every block of the unit. Knows pages and keys; knows no laws, no tokens and
no requests.

Two rules make every question cheap:

- *Growing* lanes (of groups that never let go) have a page at every node, and a node goes only
  after its children. So presence along a chain is monotone, and the longest match is found by
  galloping.
- *Bounded* lanes have pages only where a **resume point** claims them: a node at which a request
  can go on. A claimed page stays until its last claim is dropped, so a resume point that is present
  is whole.

The victim of an eviction is a resume tail: the nodes behind the last resume point or fork, all
groups together. A resume point inside a longer chain loses its claims only. Evicted keys stay for a
while as *ghosts*, without bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.eviction import EvictionPolicy, LeastRecentlyUsed, VictimQueue
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap

ROOT = -1
"""Parent of the first node of every chain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """Pages in bounded lanes that a resume point needs: ``pages[i]`` at ``(lanes[i], nodes[i])``,
    no place twice. int32.
    """

    lanes: np.ndarray
    nodes: np.ndarray
    pages: np.ndarray


class PrefixIndex:
    """Tree of hash units with the pages that hold them.

    bounded: for every lane whether its group's law lets go. max_nodes, max_ghosts: bounds on
        bookkeeping, not on bytes.
    on_evict: attribute, None at first; is told the key of every node that is let go, in that order,
        a node after its children.
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
        self._growing = np.array(
            [lane for lane, lets_go in enumerate(bounded) if not lets_go], np.int32
        )
        self._bounded = np.array(
            [lane for lane, lets_go in enumerate(bounded) if lets_go], np.int32
        )
        self._max_nodes, self._max_ghosts = max_nodes, max_ghosts
        self._node_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Places only, (lanes, nodes): the pages there may move, and ``pages`` knows where they are.
        self._claims: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._queue = VictimQueue()
        self._clock = 0
        self.evicted_nodes = 0
        self.on_evict: Callable[[bytes], None] | None = None
        self._allocate_arrays(1024, len(bounded))

    def _allocate_arrays(self, capacity: int, lanes: int) -> None:
        self._parent = np.full(capacity, ROOT, np.int32)
        self._children = np.zeros(capacity, np.int32)
        self._users = np.zeros(capacity, np.int32)
        self._resumes = np.zeros(capacity, bool)
        self._depth = np.zeros(capacity, np.int32)
        self._hits = np.zeros(capacity, np.int32)
        self._last_use = np.zeros(capacity, np.int64)
        # First node of the run of consecutive numbers, each the parent of the next, that a node is
        # in.
        self._head = np.zeros(capacity, np.int32)
        self.pages = np.full((lanes, capacity), NO_PAGE, np.int32)
        self._claimed = np.zeros((lanes, capacity), np.int32)
        self._free, self._num_free = np.arange(capacity - 1, -1, -1, dtype=np.int32), capacity

    def _grow(self) -> None:
        old = len(self._parent)
        for name in (
            "_parent",
            "_children",
            "_users",
            "_depth",
            "_hits",
            "_last_use",
            "_head",
            "_resumes",
        ):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.pages = np.concatenate([self.pages, np.full_like(self.pages, NO_PAGE)], axis=1)
        self._claimed = np.concatenate([self._claimed, np.zeros_like(self._claimed)], axis=1)
        fresh, free = np.arange(2 * old - 1, old - 1, -1, dtype=np.int32), self._free
        self._free = np.zeros(2 * old, np.int32)
        self._free[: old + self._num_free] = np.concatenate([fresh, free[: self._num_free]])
        self._num_free += old

    def __len__(self) -> int:
        return len(self._node_of)

    @property
    def resume_points(self) -> int:
        """Nodes with a claim."""
        return len(self._claims)

    @property
    def ghosts(self) -> int:
        """Evicted keys that are remembered."""
        return len(self._ghosts)

    @property
    def full(self) -> bool:
        """True where the bookkeeping bound asks for an eviction before the next insertion."""
        return len(self._node_of) >= self._max_nodes

    # -- questions (none of them changes anything) -------------------------------------------------

    def match(self, keys: np.ndarray, start: int = 0) -> np.ndarray:
        """Nodes (int32) of the longest present prefix of ``keys`` (KEY [K]), without the first
        ``start``, which are present.
        """
        known, low, step = self._node_of, start, 1
        while low + step <= len(keys) and keys[low + step - 1].tobytes() in known:
            low, step = low + step, step * 2
        high = min(low + step, len(keys) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keys[middle - 1].tobytes() in known else (low, middle)
        return (
            self._path(known[keys[low - 1].tobytes()], low - start)
            if low > start
            else np.zeros(0, np.int32)
        )

    def _path(self, node: int, count: int) -> np.ndarray:
        """The last ``count`` nodes of the chain that ends at ``node``."""
        path, stop = np.empty(count, np.int32), count
        while stop:
            head = max(int(self._head[node]), node - stop + 1)
            path[stop - (node - head + 1) : stop] = np.arange(head, node + 1)
            stop, node = stop - (node - head + 1), int(self._parent[head])
        return path

    def ghost_match(self, keys: np.ndarray, start: int) -> int:
        """Units of ``keys`` that were present once, counted from a match of ``start`` units on."""
        units = start
        while units < len(keys) and keys[units].tobytes() in self._ghosts:
            units += 1
        return units

    def depth(self, nodes: np.ndarray) -> np.ndarray:
        """Units from the root to each node, itself included."""
        return self._depth[nodes]

    def is_resume_point(self, node: int) -> bool:
        """True where a resume point's claims are held at this node."""
        return node in self._claims

    # -- growing -----------------------------------------------------------------------------------

    def insert(self, parent: int, keys: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Append new nodes below ``parent`` (a node or ROOT), one chain; returns them (int32).

        keys: KEY [K]; none may be present. pages: int32 [growing lanes, K].
        """
        count, named, before = len(keys), keys.tolist(), len(self._node_of)
        while self._num_free < count:
            self._grow()
        nodes = self._free[self._num_free - count : self._num_free][::-1].copy()
        if not count:
            return nodes
        self._num_free -= count
        parents = np.concatenate([[parent], nodes[:-1]]).astype(np.int32)
        depth = 0 if parent == ROOT else int(self._depth[parent])
        self._parent[nodes], self._depth[nodes] = parents, np.arange(depth + 1, depth + count + 1)
        self._children[nodes[:-1]], self._children[nodes[-1]] = 1, 0
        self._users[nodes] = self._hits[nodes] = 0
        if parent != ROOT:
            self._children[parent] += 1
            if parent not in self._claims:
                self._queue.withdraw(parent)
        breaks = np.flatnonzero(nodes != parents + 1)
        first = nodes[0] if parent == ROOT or nodes[0] != parent + 1 else self._head[parent]
        heads = np.concatenate([[first], nodes[breaks[breaks > 0]]])
        self._head[nodes] = heads[
            np.searchsorted(breaks[breaks > 0], np.arange(count), side="right")
        ]
        listed = nodes.tolist()
        self._node_of.update(zip(named, listed, strict=True))
        assert len(self._node_of) == before + count, "a key is inserted once"
        self._key_of.update(zip(listed, named, strict=True))
        for key in named if self._ghosts else ():
            self._ghosts.pop(key, None)
        self.pages[self._growing[:, None], nodes] = pages
        self._pool.keep(pages.reshape(-1))
        self.touch(nodes)
        return nodes

    def claim(self, node: int, claim: Claim) -> None:
        """Make ``node`` a resume point that needs ``claim``. Places that have a page already keep
        it.
        """
        assert node not in self._claims, "a resume point is claimed once"
        assert (claim.pages != NO_PAGE).all()
        missing = self.pages[claim.lanes, claim.nodes] == NO_PAGE
        self.pages[claim.lanes[missing], claim.nodes[missing]] = claim.pages[missing]
        self._pool.keep(claim.pages[missing])
        self._claimed[claim.lanes, claim.nodes] += 1
        self._claims[node], self._resumes[node] = (claim.lanes, claim.nodes), True
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

    # -- shrinking ---------------------------------------------------------------------------------

    def offer_chain(self, nodes: np.ndarray) -> None:
        """Rank a chain's leaf and resume points anew, after its last use; among equals the leaf
        goes first.
        """
        for node in nodes[self._resumes[nodes] | (self._children[nodes] == 0)][::-1].tolist():
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
        if node in self._claims and self._holds_idle_bytes(node):
            self._drop_claim(node)
            return True
        return False

    def _holds_idle_bytes(self, node: int) -> bool:
        """Does this resume point claim a page that no request is using?"""
        return bool((self._pool.references(self.pages[self._claims[node]]) == 0).any())

    def _remove_tail(self, node: int) -> None:
        if node in self._claims:
            self._drop_claim(node)
        while True:
            parent = int(self._parent[node])
            self._remove_leaf(node)
            if parent == ROOT:
                return
            self._children[parent] -= 1
            if (
                self._children[parent]
                or self._users[parent]
                or parent in self._claims
                or not len(self._bounded)
            ):
                self._offer(parent)
                return
            node = parent

    def _remove_leaf(self, node: int) -> None:
        assert self._children[node] == 0 and self._users[node] == 0
        key = self._key_of.pop(node)
        del self._node_of[key]
        self._queue.withdraw(node)
        self._pool.drop(self.pages[self._growing, node])
        self.pages[self._growing, node] = NO_PAGE
        assert (self.pages[:, node] == NO_PAGE).all(), "a leaf has no unclaimed pages"
        self._free[self._num_free] = node
        self._num_free += 1
        self.evicted_nodes += 1
        if self.on_evict is not None:
            self.on_evict(key)
        self._ghosts[key] = None
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _drop_claim(self, node: int) -> None:
        lanes, nodes = self._claims.pop(node)
        self._resumes[node] = False
        self._claimed[lanes, nodes] -= 1
        loose = self._claimed[lanes, nodes] == 0
        lanes, nodes = lanes[loose], nodes[loose]
        self._pool.drop(self.pages[lanes, nodes])
        self.pages[lanes, nodes] = NO_PAGE

    def _offer(self, node: int) -> None:
        """Enter a node that could be a victim: a leaf nobody ends on, or a resume point."""
        if (self._children[node] == 0 and self._users[node] == 0) or node in self._claims:
            rank = self._policy.rank(
                last_use=int(self._last_use[node]),
                depth=int(self._depth[node]),
                hits=int(self._hits[node]),
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

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.pages)

    def check(self, others: np.ndarray) -> None:
        """Assert the tree's invariants from scratch. ``others``: pages that somebody else uses,
        too, once per use.
        """
        live = np.array(sorted(self._key_of), np.int64)
        assert len(self._node_of) == len(live)
        counted = np.zeros_like(self._children)
        inner = live[self._parent[live] != ROOT]
        np.add.at(counted, self._parent[inner], 1)
        assert (counted[live] == self._children[live]).all(), "children are counted"
        assert np.isin(self._parent[inner], live).all(), "no orphans"
        claimed = np.zeros_like(self._claimed)
        for node, places in self._claims.items():
            assert node in self._key_of
            claimed[places] += 1
        assert (claimed == self._claimed).all(), "claims are counted"
        growing, bounded = self.pages[self._growing], self.pages[self._bounded]
        assert (growing[:, live] != NO_PAGE).all(), "a growing lane has a page at every node"
        assert ((bounded != NO_PAGE) == (self._claimed[self._bounded] > 0)).all(), (
            "bounded pages are claimed pages"
        )
        uses = np.concatenate([growing[:, live].reshape(-1), bounded[bounded != NO_PAGE], others])
        pages, times = np.unique(uses, return_counts=True)
        assert (self._pool.uses(pages) == times).all(), "the pool counts every use by the index"
