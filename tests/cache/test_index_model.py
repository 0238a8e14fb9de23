"""The prefix index against a slow one that lets go of one victim at a time, and what it does when
it grows, shrinks and grows again.

Protects: the order of victims, how many go, and that no array is shorter than another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from octavo.base import NO_PAGE
from octavo.cache.hashing import KEY
from octavo.cache.index.policy import LeastRecentlyUsed, WorthItsBytes, make_policy
from octavo.cache.index.tree import ROOT, Claim, Lane, PrefixIndex, bookkeeping_bytes
from octavo.memory.layout import ArenaLayout
from octavo.memory.pool import PagePool

SLABS, PER_SLAB = 24, 4


@dataclass
class Node:
    """A unit of a chain, as the slow index knows it."""

    key: bytes
    parent: Node | None
    page: int
    last_use: int = 0
    ticket: int = 0
    children: set[bytes] = field(default_factory=set)
    claims: set[tuple[bytes, int]] = field(default_factory=set)


class SlowIndex:
    """Least recently used, one victim at a time, by looking at everything."""

    def __init__(self, *, bounded: bool) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.clock = self.tickets = 0
        self.bounded = bounded
        self.gone: list[bytes] = []

    def offer(self, key: bytes) -> None:
        self.tickets += 1
        self.nodes[key].ticket = self.tickets

    def pages(self) -> set[int]:
        """Pages that are used, growing and claimed."""
        growing = {node.page for node in self.nodes.values()}
        return growing | {page for node in self.nodes.values() for _, page in node.claims}

    def evict(self) -> bool:
        ends = [node for node in self.nodes.values() if not node.children or node.claims]
        if not ends:
            return False
        victim = min(ends, key=lambda node: (node.last_use, node.ticket))
        victim.claims.clear()
        while not victim.children:
            del self.nodes[victim.key]
            self.gone.append(victim.key)
            if victim.parent is None:
                break
            victim.parent.children.discard(victim.key)
            parent = victim.parent
            if parent.children or parent.claims or not self.bounded:
                if not parent.children or parent.claims:
                    self.offer(parent.key)
                break
            victim = parent
        return True


class Rig:
    """Both indexes over one pool, fed alike. span: units that a page of the growing lane covers."""

    def __init__(self, *, seed: int, span: int, bounded: bool, first_size: int = 2) -> None:
        self.rng = Random(seed)
        self.span, self.bounded = span, bounded
        arena = ArenaLayout(unit_bytes=64, slab_units=PER_SLAB, num_slabs=SLABS, page_units=(1,))
        self.pool = PagePool(arena)
        lanes = [Lane(lets_go=False, units=span), Lane(lets_go=True)][: 1 + bounded]
        self.fast = PrefixIndex(
            self.pool, lanes=lanes, policy=LeastRecentlyUsed(), first_size=first_size
        )
        self.slow = SlowIndex(bounded=bounded)
        self.gone: list[bytes] = []
        self.fast.on_evict = self.gone.append
        self.made = 0

    def room(self, pages: int) -> None:
        """Make room for pages, and compare what both let go."""
        before, wanted = len(self.slow.gone), [pages]
        lacked = self.lacking(pages)
        assert self.fast.evict(wanted) or not lacked
        while self.lacking(pages):
            assert self.slow.evict()
        order = self.slow.gone[before:]
        if len(self.gone) > len(self.slow.gone):
            # A page more at most, or the rest of what serves nobody.
            while len(self.gone) > len(self.slow.gone):
                assert self.slow.evict()
            assert self.bounded or len(self.slow.gone) - before <= len(order) + self.span
        assert self.gone == self.slow.gone
        assert not self.pool.gap(wanted)
        while not self.pool.ready(wanted):
            moves = self.pool.compact()
            assert moves is not None
            to = dict(zip(moves.sources.tolist(), moves.targets.tolist(), strict=True))
            self.fast.pages[:] = [
                [to.get(page, page) for page in lane] for lane in self.fast.pages.tolist()
            ]
            for node in self.slow.nodes.values():
                node.page = to.get(node.page, node.page)
                node.claims = {(key, to.get(page, page)) for key, page in node.claims}

    def lacking(self, pages: int) -> bool:
        """Would more pages not fit, with everything cached staying, by the slow index's count?"""
        return len(self.slow.pages()) + pages > SLABS * PER_SLAB

    def add(self, units: int) -> None:
        """A chain of new units, from the root or from anywhere in another chain."""
        self.room(-(-units // self.span) + 2 + self.bounded)
        parent = self.rng.choice([None, *self.slow.nodes.values()])
        path: list[Node] = []
        node = parent
        while node is not None:
            path.insert(0, node)
            node = node.parent
        keys = [self.key() for _ in range(units)]
        pages, page = [], NO_PAGE
        for place in range(len(path), len(path) + units):
            if place % self.span == 0 or page == NO_PAGE:
                page = int(self.pool.allocate(0, 1)[0])
            pages.append(page)
        above = np.frombuffer(b"".join(n.key for n in path), KEY)
        found = self.fast.match(above)
        assert len(found) == len(path)
        made = self.fast.insert(
            int(found[-1]) if len(found) else ROOT,
            np.frombuffer(b"".join(keys), KEY),
            np.array([pages], np.int32),
        )
        self.pool.release(sorted(set(pages)))
        for key, each in zip(keys, pages, strict=True):
            new = self.slow.nodes[key] = Node(key=key, parent=parent, page=each)
            if parent is not None:
                parent.children.add(key)
            parent = new
            path.append(new)
        chain = np.concatenate([found, made]).astype(np.int32)
        if self.bounded:
            self.claim(path[-1], int(chain[-1]))
        self.fast.touch(chain)
        self.fast.offer_chain(chain)
        # ``insert`` is a use as well.
        self.slow.clock += 2
        for each in path:
            each.last_use = self.slow.clock
        for each in reversed(path):
            if not each.children or each.claims:
                self.slow.offer(each.key)

    def claim(self, end: Node, node: int) -> None:
        page = self.pool.allocate(0, 1)
        self.fast.claim(
            node,
            Claim(lanes=np.array([1], np.int32), nodes=np.array([node], np.int32), pages=page),
        )
        self.pool.release(page)
        end.claims.add((end.key, int(page[0])))

    def key(self) -> bytes:
        self.made += 1
        return self.made.to_bytes(16, "little")


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("span", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_batches_let_go_of_what_one_at_a_time_would(seed: int, span: int, bounded: bool) -> None:
    rig = Rig(seed=seed, span=span, bounded=bounded)
    for _ in range(60):
        rig.add(rig.rng.choice((1, 2, 3, 7, 20, 40)))
        rig.fast.check(np.zeros(0, np.int32))
        assert len(rig.fast) == len(rig.slow.nodes)
    assert rig.gone, "something had to go"


@pytest.mark.parametrize("first_size", [2, 64])
def test_an_index_that_has_grown_can_shrink_and_grow_again(first_size: int) -> None:
    """100,000 units, then almost none, then as many again."""
    arena = ArenaLayout(unit_bytes=64, slab_units=1000, num_slabs=110, page_units=(1,))
    pool = PagePool(arena)
    index = PrefixIndex(pool, lanes=[Lane(lets_go=False)], first_size=first_size)
    made = 0
    for _ in range(2):
        while len(index) < 100_000:
            keys = np.arange(made, made + 2 * 997, dtype=np.uint64).view(KEY)
            made += len(keys) * 2
            pages = pool.allocate(0, len(keys))
            chain = index.insert(ROOT, keys, pages[None])
            pool.release(pages)
            index.offer_chain(chain)
        index.check(np.zeros(0, np.int32))
        while pool.free_slabs < 105:
            assert index.evict([int(pool.counts(0).free + (pool.free_slabs + 1) * 1000)])
        assert len(index) < 6_000
        index.check(np.zeros(0, np.int32))
    index.clear()
    assert pool.free_slabs == 110 and not len(index)
    assert bookkeeping_bytes(1) < 600


def test_what_was_found_before_outlives_a_scan() -> None:
    """Two chains, one of them found again; then others that nobody asks for twice."""
    arena = ArenaLayout(unit_bytes=64, slab_units=10, num_slabs=10, page_units=(1,))
    for name, survives in (("worth", True), ("lru", False)):
        pool = PagePool(arena)
        index = PrefixIndex(pool, lanes=[Lane(lets_go=False)], policy=make_policy(name))

        def add(first: int, pool: PagePool = pool, index: PrefixIndex = index) -> np.ndarray:
            keys = np.arange(first, first + 20, dtype=np.uint64).view(KEY)
            index.evict([10])
            while not pool.ready([10]):
                moves = pool.compact()
                assert moves is not None
                at = np.isin(index.pages, moves.sources)
                order = np.searchsorted(moves.sources, index.pages[at])
                index.pages[at] = moves.targets[order]
            pages = pool.allocate(0, 10)
            chain = index.insert(ROOT, keys, pages[None])
            pool.release(pages)
            index.offer_chain(chain)
            return keys

        wanted = add(0)
        for turn in range(40):
            if turn in (5, 6):
                chain = index.match(wanted)
                index.touch(chain, resumed=len(chain))
                index.offer_chain(chain)
            add(1000 * (turn + 1))
        assert (len(index.match(wanted)) == 10) is survives, name


def test_ghosts_teach_what_came_back() -> None:
    arena = ArenaLayout(unit_bytes=64, slab_units=10, num_slabs=2, page_units=(1,))
    pool = PagePool(arena)
    index = PrefixIndex(pool, lanes=[Lane(lets_go=False)], policy=WorthItsBytes())
    keys = np.arange(16, dtype=np.uint64).view(KEY)
    for hits in (0, 1, 2, 3, 3):
        pages = pool.allocate(0, len(keys))
        chain = index.insert(ROOT, keys, pages[None])
        pool.release(pages)
        assert index._hits[chain].tolist() == [hits] * len(keys)
        index.offer_chain(chain)
        while index.evict():
            pass
        assert index.ghost_match(keys, 0) == len(keys)
