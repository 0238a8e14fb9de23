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

A victim is the end of a chain, or the claims of a resume point inside one. Where nothing is ever
let go a chain is cut from its end, as far as is needed; where there are bounded lanes, what lies
behind the last resume point serves nobody, and goes whole. Evicted keys stay for a while as
*ghosts*, without bytes: they say how often a prefix that comes back had been found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.hashing import KEY
from octavo.cache.index.ghosts import Ghosts
from octavo.cache.index.policy import EvictionPolicy, LeastRecentlyUsed, Victim
from octavo.cache.index.returns import MAX_LIVES, Returns
from octavo.cache.index.victims import VictimQueue
from octavo.memory.pool import PagePool
from octavo.memory.remap import Remap

ROOT = -1
"""Parent of the first node of every chain."""

MAX_HITS = 3
"""Hits that are counted: who was found so often is wanted."""

LOOK_BACK = 64
"""Runs of nodes that are looked through for the resume point before another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """Pages in bounded lanes that a resume point needs: ``pages[i]`` at ``(lanes[i], nodes[i])``,
    no place twice. int32.
    """

    lanes: np.ndarray
    nodes: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What the index must know of one lane. lets_go: its group's law does. group: number of the
    group. page_bytes: of one page. units: hash units that a page of a growing group covers; below 1
    where a unit has several.
    """

    lets_go: bool
    group: int = 0
    page_bytes: int = 1
    units: float = 1.0


def bookkeeping_bytes(lanes: int) -> int:
    """Bytes of bookkeeping that one hash unit costs at most, with so many lanes: arrays that have
    just doubled, its entry in the dictionary of keys, and a ghost's.
    """
    arrays = 4 * 8 + 8 * 2 + 3 + KEY.itemsize + 8 * lanes
    entry = 2 * (8 + 8 + 8) + 49 + 28
    return 2 * arrays + 2 * entry


class PrefixIndex:
    """Tree of hash units with the pages that hold them.

    lanes: what is to be known of every lane. unit_tokens: tokens of a hash unit. max_nodes,
    max_ghosts, max_lives: bounds on bookkeeping, not on bytes. first_size: nodes there is room for
    at first; it doubles. returns: attribute, what has been learned of when prefixes come back.
    on_evict: attribute, None at first; is told the key of every node that is let go, in that order,
    a node after its children.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        lanes: Sequence[Lane],
        unit_tokens: int = 1,
        policy: EvictionPolicy | None = None,
        max_nodes: int = 1 << 22,
        max_ghosts: int = 1 << 18,
        max_lives: int = MAX_LIVES,
        first_size: int = 1024,
    ) -> None:
        self._pool, self._unit = pool, unit_tokens
        self._policy = policy or LeastRecentlyUsed()
        growing = [number for number, lane in enumerate(lanes) if not lane.lets_go]
        self._growing = np.array(growing, np.int32)
        self._bounded = np.array(
            [number for number, lane in enumerate(lanes) if lane.lets_go], np.int32
        )
        self._page_bytes = np.array([lane.page_bytes for lane in lanes], np.float64)
        # Units that a page covers at most, and bytes of growing groups that one adds on average.
        self._units_per_page = max([1.0, *(lanes[lane].units for lane in growing)])
        self._group = np.array([lane.group for lane in lanes], np.int32)
        self._unit_bytes = np.zeros(1 + max((lane.group for lane in lanes), default=0))
        for number in growing:
            lane = lanes[number]
            self._unit_bytes[lane.group] += lane.page_bytes / lane.units
        self._max_nodes = max_nodes
        self._node_of: dict[bytes, int] = {}
        # Places only, (lanes, nodes): the pages there may move, and ``pages`` knows where they are.
        self._claims: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # What resume points claim, by group, where nobody else does.
        self._claim_bytes: dict[int, np.ndarray] = {}
        self._ghosts = Ghosts(max_ghosts)
        self.returns = Returns(max_lives=max_lives, first_size=first_size)
        self._queue = VictimQueue()
        # Resume points that could not go: all that they claim was in use.
        self._parked: set[int] = set()
        self._clock = 0
        self.on_evict: Callable[[bytes], None] | None = None
        self.evicted_nodes = 0
        self._allocate_arrays(first_size, len(lanes))

    def _allocate_arrays(self, capacity: int, lanes: int) -> None:
        self._keys = np.zeros(capacity, KEY)
        self._live = np.zeros(capacity, bool)
        self._parent = np.full(capacity, ROOT, np.int32)
        self._children = np.zeros(capacity, np.int32)
        self._users = np.zeros(capacity, np.int32)
        self._resumes = np.zeros(capacity, bool)
        self._depth = np.zeros(capacity, np.int32)
        self._hits = np.zeros(capacity, np.int32)
        self._last_use = np.zeros(capacity, np.int64)
        # Places where a request could go on: when one last did, and how often before.
        self._place = np.zeros(capacity, bool)
        self._found = np.zeros(capacity, np.int64)
        self._grade = np.zeros(capacity, np.int32)
        # First node of the run of consecutive numbers, each the parent of the next, that a node is
        # in.
        self._head = np.zeros(capacity, np.int32)
        self.pages = np.full((lanes, capacity), NO_PAGE, np.int32)
        self._claimed = np.zeros((lanes, capacity), np.int32)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity

    _PER_NODE = (
        "_keys", "_live", "_parent", "_children", "_users", "_resumes", "_depth", "_hits",
        "_last_use", "_head", "_place", "_found", "_grade",
    )  # fmt: skip

    def _grow(self) -> None:
        old = len(self._parent)
        for name in self._PER_NODE:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.pages = np.concatenate([self.pages, np.full_like(self.pages, NO_PAGE)], axis=1)
        self._claimed = np.concatenate([self._claimed, np.zeros_like(self._claimed)], axis=1)
        fresh, free = np.arange(2 * old - 1, old - 1, -1, dtype=np.int32), self._free
        self._free = np.zeros(2 * old, np.int32)
        self._free[: old + self._num_free] = np.concatenate([fresh, free[: self._num_free]])
        self._num_free += old
        assert len(self._free) == len(self._parent) == self.pages.shape[1] == 2 * old

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
            if keys[middle - 1].tobytes() in known:
                low = middle
            else:
                high = middle
        if low <= start:
            return np.zeros(0, np.int32)
        return self._path(known[keys[low - 1].tobytes()], low - start)

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
        self._parent[nodes], self._keys[nodes], self._live[nodes] = parents, keys, True
        self._depth[nodes] = np.arange(depth + 1, depth + count + 1)
        self._children[nodes[:-1]], self._children[nodes[-1]] = 1, 0
        self._users[nodes] = 0
        self._place[nodes], self._resumes[nodes] = False, False
        known = self.returns.known(named)
        self._hits[nodes] = self._returning(named, known)
        if parent != ROOT:
            self._children[parent] += 1
            if parent not in self._claims:
                self._queue.withdraw(parent)
        breaks = np.flatnonzero(nodes != parents + 1)
        joins = parent != ROOT and nodes[0] == parent + 1
        first = self._head[parent] if joins else nodes[0]
        heads = np.concatenate([[first], nodes[breaks[breaks > 0]]])
        run = np.searchsorted(breaks[breaks > 0], np.arange(count), side="right")
        self._head[nodes] = heads[run]
        self._node_of.update(zip(named, nodes.tolist(), strict=True))
        assert len(self._node_of) == before + count, "a key is inserted once"
        self.pages[self._growing[:, None], nodes] = pages
        self._pool.keep(pages.reshape(-1))
        self.touch(nodes)
        for at, _ in known:
            self._come_back(int(nodes[at]))
        return nodes

    def _returning(self, named: Sequence[bytes], known: Sequence[tuple[int, int]]) -> np.ndarray:
        """Hits of new nodes: of those that are remembered, one more than they had. Ghosts remember
        every node for a while, the ``known`` places some of them for longer.

        Where the first is no ghost none of the others is asked: children are evicted before their
        parents, so what is known of them is an end of another chain's.
        """
        hits = np.zeros(len(named), np.int32)
        if named[0] in self._ghosts:
            found = self._ghosts.take(named)
            hits[:] = [0 if before is None else before + 1 for before in found]
        for at, before in known:
            hits[: at + 1] = np.maximum(hits[: at + 1], before + 1)
        return np.minimum(hits, MAX_HITS)

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
        self._claim_bytes[node] = np.bincount(
            self._group[claim.lanes], self._page_bytes[claim.lanes], len(self._unit_bytes)
        )
        self._begin(node)
        self._offer(node)

    def touch(self, nodes: np.ndarray, *, resumed: int | None = None) -> None:
        """Note a use of a chain's nodes (root first). resumed: units after which a request that
        found them goes on.
        """
        self._clock += 1
        self._last_use[nodes] = self._clock
        if resumed is None or not len(nodes):
            return
        self._hits[nodes] = np.minimum(self._hits[nodes] + 1, MAX_HITS)
        places = nodes[self._place[nodes]].tolist()
        if len(self._bounded):
            # Where it goes on, and where it could have if no claim had been dropped.
            places = sorted({*places[-1:], *nodes[max(0, resumed - 1) : resumed].tolist()})
        for node in places:
            if self._place[node]:
                self._come_back(node)

    def _begin(self, node: int) -> None:
        """A request could go on from this node. Nothing happens where that is known."""
        if not self._place[node]:
            self._place[node], self._found[node] = True, self._clock
            self._grade[node] = self._hits[node]
            self.returns.begin(self._keys[node].tobytes(), int(self._hits[node]), self._clock)

    def _come_back(self, node: int) -> None:
        """A request has come to this place again, from which it, or an earlier one, could go on."""
        self._place[node], self._found[node] = True, self._clock
        self._grade[node] = self._hits[node]
        self.returns.come_back(self._keys[node].tobytes(), int(self._hits[node]), self._clock)

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
        if len(nodes) and not len(self._bounded):
            self._begin(int(nodes[-1]))
        for node in nodes[self._resumes[nodes] | (self._children[nodes] == 0)][::-1].tolist():
            self._offer(node)

    def evict(self, wanted: Sequence[int] | None = None) -> bool:
        """Let victims go, lowest rank first, until ``wanted`` pages by bucket can be gathered by
        compaction; without ``wanted``, one victim. False where nothing could go: all is in use.

        Work is counted in victims, which are ends of chains, not in units.
        """
        gone = False
        while gap := 1 if wanted is None else self._pool.gap(wanted):
            if not self._evict_some(gap):
                break
            gone = True
            if wanted is None:
                break
        return gone

    def give_up(self, node: int) -> None:
        """Let the claims of a resume point go; its chain stays."""
        self._parked.discard(node)
        self._queue.withdraw(node)
        self._resumes[node] = False
        del self._claim_bytes[node]
        self._drop([self._claims.pop(node)])
        self._offer(node)
        assert not self.is_resume_point(node)

    def shrink(self) -> None:
        """Let victims go until the bound on nodes is kept, if possible."""
        while len(self._node_of) > self._max_nodes and self._evict_some(1):
            pass

    def clear(self) -> None:
        """Forget everything that no request stands on, ghosts included."""
        while self._evict_some(1 << 20):
            pass
        self._ghosts.clear()
        self.returns.clear()
        self._place[:] = False

    def _evict_some(self, pages: float) -> bool:
        """Let victims go that free at most ``pages`` pages together, but at least one. False where
        there is none.
        """
        while (expired := self._queue.expired(self._clock)) is not None:
            self._offer(expired)
        nodes, claims, room = list[np.ndarray](), list[tuple[np.ndarray, np.ndarray]](), pages
        while room > 0 and (node := self._next_victim()) is not None:
            if node in self._claims:
                claims.append(self._claims.pop(node))
                del self._claim_bytes[node]
                self._resumes[node] = False
                room -= len(claims[-1][0])
            if self._children[node] == 0 and self._users[node] == 0:
                tail, freed = self._cut(node, room)
                nodes.append(tail)
                room -= max(1, freed)
        self._drop(claims)
        if nodes:
            self._remove(np.concatenate(nodes))
        return bool(nodes or claims)

    def _next_victim(self) -> int | None:
        """Take the lowest-ranked node out of the queue at which anything can go, None where there
        is none.
        """
        for _ in range(2):
            while (found := self._queue.pop()) is not None:
                ranked, node = found
                ends = self._children[node] == 0 and self._users[node] == 0
                if not ends and node not in self._claims:
                    # It is offered again when its user leaves.
                    continue
                if not ends and not self._keeps_idle_bytes(node):
                    self._parked.add(node)
                    continue
                if (rank := self._policy.rank(self._victim(node), self.returns)) > ranked:
                    # It is worth more by now.
                    self._put(node, float(rank))
                    continue
                return node
            # All pages of these were in use, by requests whose end did not offer them again.
            for node in sorted(self._parked):
                if self._keeps_idle_bytes(node):
                    self._offer(node)
        return None

    def _keeps_idle_bytes(self, node: int) -> bool:
        """Does this resume point claim a page that no request is using?"""
        return bool((self._pool.references(self.pages[self._claims[node]]) == 0).any())

    def _cut(self, node: int, room: float) -> tuple[np.ndarray, int]:
        """Take the end of a chain at ``node`` off the tree, and offer what is the end then. Returns
        the nodes taken off, the last one first, and how many pages of growing lanes that frees at
        most.

        Where there are bounded lanes, that is all behind the resume point, user or fork before it;
        else what ranks lowest, as far as it frees no more than ``room`` pages, or one in every
        lane.
        """
        whole, lanes = bool(len(self._bounded)), len(self._growing)
        most = len(self._parent) if whole else int((room + 1) * self._units_per_page)
        nodes = self._tail(node, most=most, limit=None if whole else self._queue.top())
        pages = self.pages[self._growing[:, None], nodes]
        freed = np.full(len(nodes), lanes)
        freed[1:] += np.cumsum(np.count_nonzero(pages[:, 1:] != pages[:, :-1], axis=0))
        if not whole:
            nodes = nodes[: int(np.searchsorted(freed, max(room, lanes), side="right"))]
        parent = int(self._parent[nodes[-1]])
        if parent != ROOT:
            self._children[parent] -= 1
            assert self._children[parent] >= 0
            self._offer(parent)
        self._live[nodes] = False
        return nodes, int(freed[len(nodes) - 1])

    def _tail(self, node: int, *, most: int, limit: float | None) -> np.ndarray:
        """Nodes from the end of a chain back to where somebody else needs them, or one ranks behind
        ``limit``; the end itself in any case, and about ``most`` if there are more.
        """
        taken: list[np.ndarray] = []
        while True:
            head = max(int(self._head[node]), node - most)
            run = np.arange(node, head - 1, -1, dtype=np.int32)
            stays = (self._children[run] > 1) | (self._users[run] > 0) | self._resumes[run]
            if limit is not None:
                stays |= self._ranks(run) > limit
            stays[0] &= bool(taken)
            stop = int(stays.argmax()) if stays.any() else len(run)
            taken.append(run[:stop])
            parent = int(self._parent[head])
            most -= stop
            if stop < len(run) or parent == ROOT or most < 0:
                return np.concatenate(taken)
            node = parent

    def _ranks(self, nodes: np.ndarray) -> np.ndarray:
        """Ranks of nodes of a chain of growing lanes, one by one."""
        victim = Victim(
            now=self._clock,
            last_use=self._last_use[nodes],
            found=self._last_use[nodes],
            hits=self._hits[nodes],
            depth=int(self._depth[nodes[0]]) * self._unit,
            saved=self._unit,
            bytes=tuple(self._unit_bytes.tolist()),
        )
        return np.asarray(self._policy.rank(victim, self.returns))

    def _remove(self, nodes: np.ndarray) -> None:
        """Forget nodes that have been cut off, children before parents."""
        assert not self._live[nodes].any() and not self._users[nodes].any()
        keys = self._keys[nodes].tolist()
        hits = self._hits[nodes].tolist()
        forget = self._node_of.__delitem__
        for key in keys:
            forget(key)
        if self.on_evict is not None:
            for key in keys:
                self.on_evict(key)
        self._ghosts.add(keys, hits)
        pages = self.pages[self._growing[:, None], nodes]
        self.pages[self._growing[:, None], nodes] = NO_PAGE
        assert (self.pages[self._bounded[:, None], nodes] == NO_PAGE).all(), (
            "a leaf has no unclaimed pages"
        )
        self._pool.drop(pages.reshape(-1))
        # So that numbers are handed out again in runs.
        self._free[self._num_free : self._num_free + len(nodes)] = np.sort(nodes)[::-1]
        self._num_free += len(nodes)
        self.evicted_nodes += len(nodes)
        assert not self._resumes[nodes].any(), "a claim goes before its node"

    def _drop(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Give up claims: what nobody else claims goes."""
        if not parts:
            return
        lanes = np.concatenate([part[0] for part in parts])
        nodes = np.concatenate([part[1] for part in parts])
        np.subtract.at(self._claimed, (lanes, nodes), 1)
        places = np.unique(lanes.astype(np.int64) * len(self._parent) + nodes)
        lanes, nodes = np.divmod(places, len(self._parent))
        loose = self._claimed[lanes, nodes] == 0
        lanes, nodes = lanes[loose], nodes[loose]
        self._pool.drop(self.pages[lanes, nodes])
        self.pages[lanes, nodes] = NO_PAGE
        assert (self._claimed[lanes, nodes] == 0).all(), "what is let go is nobody's claim"

    def _offer(self, node: int) -> None:
        """Enter a node that could be a victim: a leaf nobody ends on, or a resume point."""
        if (self._children[node] == 0 and self._users[node] == 0) or node in self._claims:
            self._parked.discard(node)
            self._put(node, float(self._policy.rank(self._victim(node), self.returns)))

    def _put(self, node: int, rank: float) -> None:
        until = self._policy.holds_until(self._victim(node), self.returns)
        self._queue.put(node, rank, until=until)

    def _victim(self, node: int) -> Victim:
        """What a policy must know of the victim at a node."""
        bounded = bool(len(self._bounded))
        units = self._since_resume_point(node) if bounded else 1
        kept = units * self._unit_bytes if self._children[node] == 0 else 0 * self._unit_bytes
        if node in self._claims:
            kept = kept + self._claim_bytes[node]
        # Without bounded lanes a request can go on anywhere.
        last_use, hits = int(self._last_use[node]), int(self._hits[node])
        return Victim(
            now=self._clock,
            last_use=last_use,
            found=int(self._found[node]) if bounded else last_use,
            hits=int(self._grade[node]) if bounded else hits,
            depth=int(self._depth[node]) * self._unit,
            saved=units * self._unit if node in self._claims or not bounded else 0,
            bytes=tuple(kept.tolist()),
        )

    def _since_resume_point(self, node: int) -> int:
        """Units from the resume point before a node, itself included; a few runs are looked
        through.
        """
        units = 0
        for _ in range(LOOK_BACK):
            head = int(self._head[node])
            run = self._resumes[head : node + 1][::-1]
            start = 1 if units == 0 else 0
            found = run[start:].argmax() if run[start:].any() else -1
            if found >= 0:
                return units + int(found) + start
            units += node - head + 1
            node = int(self._parent[head])
            if node == ROOT:
                break
        return units

    def remap(self, moved: Remap) -> None:
        """Pages have moved."""
        moved.apply(self.pages)

    # -- check -------------------------------------------------------------------------------------

    def check(self, others: np.ndarray) -> None:
        """Assert the tree's invariants from scratch. ``others``: pages that somebody else uses,
        too, once per use.
        """
        self._check_sizes()
        self.returns.check(self._clock)
        assert self._claims.keys() == self._claim_bytes.keys()
        live = np.flatnonzero(self._live)
        assert sorted(self._node_of.values()) == live.tolist()
        assert [self._node_of[key] for key in self._keys[live].tolist()] == live.tolist()
        counted = np.zeros_like(self._children)
        inner = live[self._parent[live] != ROOT]
        np.add.at(counted, self._parent[inner], 1)
        assert (counted[live] == self._children[live]).all(), "children are counted"
        assert np.isin(self._parent[inner], live).all(), "no orphans"
        claimed = np.zeros_like(self._claimed)
        for node, places in self._claims.items():
            assert self._live[node] and self._resumes[node]
            claimed[places] += 1
        assert np.count_nonzero(self._resumes[live]) == len(self._claims)
        assert (claimed == self._claimed).all(), "claims are counted"
        growing, bounded = self.pages[self._growing], self.pages[self._bounded]
        assert (growing[:, live] != NO_PAGE).all(), "a growing lane has a page at every node"
        assert ((bounded != NO_PAGE) == (self._claimed[self._bounded] > 0)).all(), (
            "bounded pages are claimed pages"
        )
        ends = live[(self._children[live] == 0) & (self._users[live] == 0)]
        known = (*ends.tolist(), *self._claims)
        assert all(node in self._queue or node in self._parked for node in known), (
            "what could be let go is known"
        )
        assert all(node in self._claims for node in self._parked)
        uses = np.concatenate([growing[:, live].reshape(-1), bounded[bounded != NO_PAGE], others])
        pages, times = np.unique(uses, return_counts=True)
        assert (self._pool.uses(pages) == times).all(), "the pool counts every use by the index"

    def _check_sizes(self) -> None:
        size = len(self._parent)
        assert all(len(getattr(self, name)) == size for name in self._PER_NODE)
        assert self.pages.shape[1] == self._claimed.shape[1] == len(self._free) == size
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free), "a node is free once"
        assert np.count_nonzero(self._live) + self._num_free == size, "live or free"
        assert not self._live[free].any()
