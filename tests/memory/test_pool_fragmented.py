"""The pool's model test, begun in an arena that is nearly full and riddled with holes.

Begun empty, random rules seldom meet two partly used slabs of one bucket, and without those the
choice of slab, compaction and pins are hardly exercised.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from octavo.memory.layout import ArenaLayout
from octavo.memory.pool import PagePool
from tests.memory.test_pool_model import LAYOUTS, Model, Page, PoolMachine

ROOMY = (
    ArenaLayout(unit_bytes=256, slab_units=4, num_slabs=6, page_units=(1,)),
    ArenaLayout(unit_bytes=256, slab_units=6, num_slabs=8, page_units=(2, 1)),
    *LAYOUTS[:2],
)


class FragmentedMachine(PoolMachine):
    """Every page allocated, then each one freed, cached, pinned or left held, by chance."""

    @initialize(layout=st.sampled_from(ROOMY), random=st.randoms(use_true_random=False))
    def begin(self, layout, random) -> None:
        self.pool, self.model, self.step = PagePool(layout), Model(layout), 0
        buckets = len(layout.page_units)
        for bucket in range(buckets):
            share = layout.num_slabs // buckets
            for address in self.pool.allocate(
                bucket, share * layout.pages_per_slab(bucket)
            ).tolist():
                self.model.pages[address] = Page(bucket)
        for address in list(self.model.pages):
            self.fate(
                address, random.choice(["free", "free", "free", "held", "cached", "pinned cached"])
            )

    def fate(self, address: int, fate: str) -> None:
        page, pages = self.model.pages[address], np.array([address], np.int32)
        if "cached" in fate:
            self.pool.keep(pages)
            page.uses = 1
        if "pinned" in fate:
            self.pool.pin(pages)
            page.pins = 1
        if fate != "held":
            self.pool.release(pages)
            page.references = 0
        if fate == "free":
            del self.model.pages[address]


FragmentedMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=15, deadline=None
)
TestFragmentedPoolAgainstModel = FragmentedMachine.TestCase


@pytest.mark.parametrize("seed", range(200))
def test_admission_and_compaction_are_exact_in_fragmented_arenas(seed):
    """Whatever is held, cached and pinned: fits() promises exactly what eviction and compaction to
    the end deliver.
    """
    chance = np.random.default_rng(seed)
    layout = ROOMY[seed % len(ROOMY)]
    buckets, pool = len(layout.page_units), PagePool(layout)
    sizes = [layout.pages_per_slab(bucket) for bucket in range(buckets)]
    pages = [
        pool.allocate(bucket, layout.num_slabs // buckets * sizes[bucket])
        for bucket in range(buckets)
    ]
    for mine in pages:
        fate = chance.choice(4, len(mine), p=[0.55, 0.2, 0.15, 0.1])
        pool.keep(mine[fate >= 2])
        pool.pin(mine[fate == 3])
        pool.release(mine[fate != 1])
    promised = {}
    for first in range(sizes[0] * layout.num_slabs + 1):
        wanted = [first] + [int(chance.integers(0, 6)) for _ in range(buckets - 1)]
        promised[tuple(wanted)] = pool.fits(wanted)
    for mine in pages:
        gone = mine[(pool.uses(mine) > 0) & (pool.references(mine) == 0)]
        pinned = pool_pins(pool, gone)
        pool.drop(gone[~pinned])
    while (moves := pool.compact()) is not None:
        used = (pool.snapshot().states != 0).sum(axis=1)
        assert used[moves.sources // layout.slab_units].max() == 0
        pool.check()
    assert len(set(promised.values())) == 2, "the arena never ran out: the case decides nothing"
    for wanted, promise in promised.items():
        assert pool.ready(list(wanted)) == promise


def pool_pins(pool: PagePool, pages: np.ndarray) -> np.ndarray:
    """Which pages are pinned, found out through the public interface: only those refuse to lose
    their last use.
    """
    found = []
    for page in pages.tolist():
        pool.retain([page])
        pool.drop([page])
        found.append(not pool.exclusive([page])[0])
        pool.keep([page])
        pool.release([page])
    return np.array(found, bool)
