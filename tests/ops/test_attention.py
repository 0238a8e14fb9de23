"""Paged attention in plain PyTorch against the naive one: ragged lengths, odd tables and rings,
windows, fewer queries than entries, fresh and paged mixed, NaN everywhere else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.library import available
from octavo.ops.cpu import attention as compiled
from octavo.ops.oracles.attention import attend as oracle
from octavo.ops.paged import CacheView
from octavo.ops.torch import attention, batches
from octavo.ops.torch.attention import attend, count_below
from octavo.ops.torch.batches import union
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Window
from octavo.spec.stream import Field, Stream
from tests.ops.worlds import make_parts, make_reads, make_view

LAWS = st.one_of(
    st.just(Everything()),
    st.builds(Window, st.integers(1, 50)),
    st.builds(Chunk, st.integers(1, 50)),
    st.builds(SinkWindow, st.integers(1, 30), st.integers(1, 30)),
)


def scene(
    seed: int,
    law: Law,
    *,
    block: int = 4,
    heads: int = 2,
    shared: int = 2,
    dim: int = 8,
    decode: float = 0.3,
    dtype: torch.dtype = torch.float64,
    fewer: bool = False,
    ring: bool = False,
) -> tuple[Tensor, CacheView, Tensor]:
    """(queries, view, sinks)."""
    parts = make_parts(seed, requests=5, chunk=40, decode=decode, fewer=fewer)
    reads = make_reads(seed, parts, law, block=block, ring=ring, fresh=0.5)
    # Kept in float32 at most, as in caches.
    kept = str(torch.float32 if dtype == torch.float64 else dtype).removeprefix("torch.")
    fields = tuple(Field(name=n, shape=(heads, dim), dtype=kept, shard="heads") for n in "kv")
    stream = Stream(name="kv", law=law, fields=fields)
    view = make_view(seed, reads, stream, dict.fromkeys("kv", (heads, dim)), fresh_only=True)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(parts.query_positions), heads * shared, dim, generator=generator)
    return q.to(dtype), view, torch.randn(heads * shared, generator=generator)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    law=LAWS,
    block=st.integers(1, 20),
    heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    dim=st.sampled_from([2, 8]),
    decode=st.sampled_from([0.0, 0.5, 1.0]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    fewer=st.booleans(),
    ring=st.booleans(),
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
    fewer: bool,
    ring: bool,
) -> None:
    shape = {"block": block, "heads": heads, "shared": shared, "dim": dim, "decode": decode}
    q, view, logits = scene(seed, law, fewer=fewer, ring=ring, **shape)  # type: ignore[arg-type]
    rule = {"scale": 0.3, "softcap": softcap, "sinks": logits if sinks else None}
    if len(q):
        torch.testing.assert_close(
            attend(q, view, **rule), oracle(q, view, **rule), atol=1e-9, rtol=1e-9
        )


@pytest.mark.parametrize("law", [Everything(), Window(30), Chunk(30), SinkWindow(3, 20)])
def test_small_tiles_and_buckets_change_nothing(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    q, view, _ = scene(3, law)
    naive = oracle(q, view, scale=0.3)
    monkeypatch.setattr(attention, "TILE_SCORES", 1)
    monkeypatch.setattr(batches, "BUCKET_TOKENS", 1)
    torch.testing.assert_close(attend(q, view, scale=0.3), naive, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("law", [Everything(), Window(30), Chunk(30), SinkWindow(3, 20)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)]
)
@pytest.mark.parametrize("decode", [0.3, 1.0])
def test_dtypes_of_models(law: Law, dtype: torch.dtype, tolerance: float, decode: float) -> None:
    for seed in range(3):
        q, view, sinks = scene(seed, law, decode=decode, dtype=dtype)
        naive = oracle(q, view, scale=0.3, sinks=sinks)
        for run in (attend, compiled.attend) if available() else (attend,):
            made = run(q, view, scale=0.3, sinks=sinks)
            assert made.dtype == dtype
            torch.testing.assert_close(made.double(), naive, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not available(), reason="no compiled kernels")
def test_compiled_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", None)
    q, view, _ = scene(3, Window(9), decode=0.5, dtype=torch.float32)
    compiled.attend(q, view, scale=0.3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), window=st.integers(1, 40), block=st.integers(1, 12))
def test_layers_that_share_see_what_the_first_made_and_the_last_stores_it(
    seed: int, window: int, block: int
) -> None:
    """Three layers over one stream, with queries of their own: a write behind the reads must wait
    for the last.
    """
    q, first, _ = scene(seed, Window(window), block=block)
    before = {name: field.data.clone() for name, field in first.fields.items()}
    made = {name: some.clone() for name, some in first.fresh.items()}
    for layer in range(3):
        view = replace(first, first=layer == 0, last=layer == 2)
        queries = q + layer
        torch.testing.assert_close(
            attend(queries, view, scale=0.3),
            oracle(queries, view, scale=0.3),
            atol=1e-9,
            rtol=1e-9,
        )
        view.end()
        for name, field in first.fields.items():
            kept = before[name].view(torch.uint8)
            assert layer == 2 or torch.equal(field.data.view(torch.uint8), kept)
    assert not first.fresh
    writes = first.reads.after
    for name, field in first.fields.items():
        expected = before[name]
        expected[writes.pages, :, writes.rows] = made[name][writes.entries]
        assert torch.equal(field.data.view(torch.uint8), expected.view(torch.uint8))


def test_union_and_count_below() -> None:
    assert union([(5, 9), (0, 2), (2, 3), (7, 8), (4, 4)]) == ((0, 3), (5, 9))
    assert [count_below(((0, 3), (5, 9)), p) for p in (-1, 0, 2, 4, 6, 20)] == [0, 0, 2, 3, 4, 7]
