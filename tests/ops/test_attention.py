"""The fast paged attention against the naive one: ragged lengths, odd tables, windows, fresh and
paged mixed, NaN everywhere else.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.library import available
from octavo.ops import attention
from octavo.ops.attention import attend, count_below
from octavo.ops.paged import CacheView, FieldView
from octavo.ops.reference import attend_reference
from octavo.runner.batch import PlannedGroup, union
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Window
from tests.runner.plans import GREEDY

CPU = torch.device("cpu")


class World:
    """Requests with random pasts in random pages, and one step over them."""

    def __init__(
        self, seed: int, *, law: Law, block: int, heads: int, shared: int, dim: int, decode: float
    ) -> None:
        rng = np.random.default_rng(seed)
        self.law, self.heads, self.dim = law, heads, dim
        count = int(rng.integers(1, 7))
        start = rng.integers(0, 60, count)
        length = np.where(rng.random(count) < decode, 1, rng.integers(1, 40, count))
        self.fresh = rng.random(count) < 0.5
        columns = 100 // block + 2
        pages = (
            rng.permutation(count * columns * 2)[: count * columns]
            .reshape(count, columns)
            .astype(np.int32)
        )
        self.views = tuple(
            FieldView(
                torch.full(
                    (count * columns * 2, heads, block, dim), float("nan"), dtype=torch.float64
                )
            )
            for _ in "kv"
        )
        rows = rng.permutation(count).astype(np.int32)
        query = np.concatenate(([0], np.cumsum(length))).astype(np.int32)
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(start, length, strict=True)]
        )
        owner = np.repeat(np.arange(count), length)
        page = pages[rows[owner], positions // block]
        lost = self.fresh[owner] & (rng.random(len(owner)) < 0.3)
        self.group = GroupStep(
            table=pages,
            rows=rows,
            fixed=None,
            turning=0,
            block_tokens=block,
            fresh=self.fresh,
            write_page=np.where(lost, -1, page).astype(np.int32),
            write_row=(positions % block).astype(np.int32),
        )
        self.plan = StepPlan(
            step=0,
            request_ids=tuple(map(str, range(count))),
            token_ids=np.zeros(len(owner), dtype=np.int32),
            query_start=query,
            start=start.astype(np.int32),
            stop=(start + length).astype(np.int32),
            samples=np.zeros(count, dtype=bool),
            sampling=(GREEDY,) * count,
            output_len=np.zeros(count, dtype=np.int32),
            branch=np.zeros(count, dtype=np.int32),
            groups=(self.group,),
        )
        generator = torch.Generator().manual_seed(seed)
        for i in range(count):
            for a, b in self.law.needs(int(start[i])):
                for position in range(a, b):
                    for view in self.views:
                        entry = torch.randn(heads, dim, generator=generator, dtype=torch.float64)
                        view.data[int(pages[rows[i], position // block]), :, position % block] = (
                            entry
                        )
        shape = (len(owner), heads, dim)
        self.q = torch.randn(
            len(owner), heads * shared, dim, generator=generator, dtype=torch.float64
        )
        self.k, self.v = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "kv"
        )
        self.sinks = torch.randn(heads * shared, generator=generator, dtype=torch.float64)

    def narrow(self, dtype: torch.dtype) -> World:
        """Itself, with all numbers in ``dtype``."""
        self.q, self.k, self.v, self.sinks = (
            one.to(dtype) for one in (self.q, self.k, self.v, self.sinks)
        )
        self.views = tuple(FieldView(view.data.to(dtype)) for view in self.views)
        return self

    def both(
        self, *, softcap: float | None = None, sinks: bool = False
    ) -> tuple[Tensor, Tensor, bool]:
        """(fast, naive, whether both left the same bytes)."""
        rule = {
            "scale": 0.3,
            "law": self.law,
            "softcap": softcap,
            "sinks": self.sinks if sinks else None,
        }
        copies = tuple(FieldView(view.data.clone()) for view in self.views)
        naive = attend_reference(self.q, self.k, self.v, copies, self.plan, self.group, **rule)
        view = CacheView(
            fields=dict(zip("kv", self.views, strict=True)),
            batch=PlannedGroup(self.plan, self.group, self.law, CPU),
        )
        fast = attend(self.q, self.k, self.v, view, **rule)
        same = all(
            torch.equal(a.data.nan_to_num(7.5), b.data.nan_to_num(7.5))
            for a, b in zip(self.views, copies, strict=True)
        )
        return fast, naive, same


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    law=st.one_of(
        st.just(Everything()),
        st.builds(Window, st.integers(1, 50)),
        st.builds(Chunk, st.integers(1, 50)),
        st.builds(SinkWindow, st.integers(1, 30), st.integers(1, 30)),
    ),
    block=st.integers(1, 20),
    heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    dim=st.sampled_from([2, 8]),
    decode=st.sampled_from([0.0, 0.5, 1.0]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_fast_equals_naive(
    seed: int,
    law: Law,
    block: int,
    heads: int,
    shared: int,
    dim: int,
    decode: float,
    softcap: float | None,
    sinks: bool,
) -> None:
    world = World(seed, law=law, block=block, heads=heads, shared=shared, dim=dim, decode=decode)
    fast, naive, same = world.both(softcap=softcap, sinks=sinks)
    torch.testing.assert_close(fast, naive, atol=1e-9, rtol=1e-9)
    assert same


@pytest.mark.parametrize("law", [Everything(), Window(30), Chunk(30), SinkWindow(3, 20)])
def test_small_tiles_and_buckets_change_nothing(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, law=law, block=4, heads=2, shared=2, dim=8, decode=0.3)
    naive = World(3, law=law, block=4, heads=2, shared=2, dim=8, decode=0.3).both()[1]
    monkeypatch.setattr(attention, "TILE_SCORES", 1)
    monkeypatch.setattr("octavo.runner.batch.BUCKET_TOKENS", 1)
    torch.testing.assert_close(world.both()[0], naive, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("law", [Everything(), Window(30), Chunk(30), SinkWindow(3, 20)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)]
)
@pytest.mark.parametrize("decode", [0.3, 1.0])
def test_dtypes_of_models(law: Law, dtype: torch.dtype, tolerance: float, decode: float) -> None:
    for seed in range(5):
        world = World(seed, law=law, block=4, heads=2, shared=2, dim=8, decode=decode).narrow(dtype)
        fast, naive, same = world.both(sinks=True)
        torch.testing.assert_close(fast.double(), naive, atol=tolerance, rtol=tolerance)
        assert same and fast.dtype == dtype


@pytest.mark.skipif(not available(), reason="no compiled kernels")
def test_compiled_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_request", None)
    monkeypatch.setattr(attention, "_decode", None)
    World(3, law=Window(9), block=4, heads=2, shared=2, dim=8, decode=0.5).narrow(
        torch.float32
    ).both()


def test_a_page_read_as_one_block_and_written_as_another() -> None:
    world = World(5, law=Window(4), block=4, heads=1, shared=1, dim=8, decode=0.0)
    group, plan = world.group, world.plan
    group.fresh[:] = True
    # Everything the step stores goes where the past it reads lies.
    for i, row in enumerate(group.rows):
        past = max(0, int(plan.start[i]) - 1) // 4
        group.write_page[plan.query_start[i] : plan.query_start[i + 1]] = group.table[row, past]
    # One row is written many times; only what is read matters here.
    fast, naive, _ = world.both()
    torch.testing.assert_close(fast, naive, atol=1e-9, rtol=1e-9)


def test_union_and_count_below() -> None:
    assert union([(5, 9), (0, 2), (2, 3), (7, 8), (4, 4)]) == ((0, 3), (5, 9))
    assert [count_below(((0, 3), (5, 9)), p) for p in (-1, 0, 2, 4, 6, 20)] == [0, 0, 2, 3, 4, 7]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), window=st.integers(1, 40), block=st.integers(1, 12))
def test_layers_that_share_see_what_the_first_made_and_the_last_stores_it(
    seed: int, window: int, block: int
) -> None:
    """Three layers over one stream, with queries of their own: a write behind the reads must wait
    for the last.
    """
    options = {"block": block, "heads": 2, "shared": 2, "dim": 4, "decode": 0.3}
    first, *others = (World(seed, law=Window(window), **options) for _ in range(3))
    views = dict(zip("kv", first.views, strict=True))
    batch, fresh = PlannedGroup(first.plan, first.group, first.law, CPU), {}
    for layer, world in enumerate((first, *others)):
        world.q = torch.randn(
            first.q.shape, generator=torch.Generator().manual_seed(layer), dtype=torch.float64
        )
        naive = attend_reference(
            world.q,
            world.k,
            world.v,
            world.views if layer else tuple(FieldView(v.data.clone()) for v in world.views),
            world.plan,
            world.group,
            law=first.law,
            scale=0.3,
        )
        view = CacheView(fields=views, batch=batch, fresh=fresh, first=layer == 0, last=layer == 2)
        own = (first.k, first.v) if layer == 0 else (None, None)
        torch.testing.assert_close(
            attend(world.q, *own, view, law=first.law, scale=0.3), naive, atol=1e-9, rtol=1e-9
        )
    assert not fresh
    for shared, alone in zip(first.views, others[0].views, strict=True):
        assert torch.equal(shared.data.nan_to_num(7.5), alone.data.nan_to_num(7.5))
