"""Paged attention against the slow one, on every instruction set this machine has: ragged lengths,
odd tables and rings, fresh and paged mixed, windows, chunks, prefixes, heads of any size, NaN
wherever nothing is to be read.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.library import levels, library
from octavo.ops.cpu.attention import attend
from octavo.ops.oracles.attention import _entry
from octavo.ops.oracles.attention import attend as oracle
from octavo.ops.paged import CacheView, FieldView, StreamView
from octavo.ops.reads import Parts, Reads
from octavo.ops.torch.backend import TORCH
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Window
from octavo.spec.stream import Field, Stream
from tests.ops.worlds import make_parts, make_reads, make_view

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a step. kv, q: dtypes. longest: tokens of a past. chunk: most tokens of a request in the
    step. fewer: not every token has a query.
    """

    law: Law
    block: int = 16
    heads: int = 1
    shared: int = 1
    dim: int = 64
    value_dim: int = 64
    kv: torch.dtype = torch.float32
    q: torch.dtype = torch.float32
    requests: int = 3
    longest: int = 60
    chunk: int = 1
    ring: bool = False
    fewer: bool = False

    @property
    def stream(self) -> Stream:
        """Keys and values."""
        name = str(self.kv).removeprefix("torch.")
        widths = (("k", self.dim), ("v", self.value_dim))
        fields = tuple(
            Field(name=part, shape=(self.heads, width), dtype=name, shard="heads")
            for part, width in widths
        )
        return Stream(name="kv", law=self.law, fields=fields)


def make(shape: Shape, seed: int) -> tuple[Tensor, CacheView, Tensor]:
    """(queries, view, sinks). What the law does not need is NaN."""
    parts = make_parts(
        seed,
        requests=shape.requests,
        longest=shape.longest,
        chunk=shape.chunk,
        decode=0.2,
        fewer=shape.fewer,
    )
    reads = make_reads(seed, parts, shape.law, block=shape.block, ring=shape.ring, fresh=0.5)
    widths = {"k": (shape.heads, shape.dim), "v": (shape.heads, shape.value_dim)}
    view = make_view(seed, reads, shape.stream, widths, dtype=torch.float32, fresh_only=True)
    generator, heads = torch.Generator().manual_seed(seed), shape.heads * shape.shared
    count = len(parts.query_positions)
    q = torch.randn(count, 2 * heads, shape.dim, generator=generator).to(shape.q)[:, heads:]
    return q, view, torch.randn(heads, generator=generator)


def compare(
    shape: Shape,
    seed: int,
    isa: str,
    *,
    softcap: float | None = None,
    sinks: bool = False,
    threads: int = 1,
) -> None:
    q, view, logits = make(shape, seed)
    rule: dict[str, Any] = {
        "scale": shape.dim**-0.5,
        "softcap": softcap,
        "sinks": logits if sinks else None,
    }
    if not len(q):
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = attend(q, view, **rule, kernels=library(isa))
    finally:
        torch.set_num_threads(before)
    slow = oracle(q, view, **rule)
    assert fast.dtype == shape.q and fast.shape == slow.shape
    torch.testing.assert_close(
        fast.double(), slow, atol=TOLERANCE[shape.q], rtol=TOLERANCE[shape.q]
    )


LAWS = st.one_of(
    st.just(Everything()),
    st.builds(Window, st.integers(1, 50)),
    st.builds(Chunk, st.integers(1, 50)),
    st.builds(SinkWindow, st.integers(1, 30), st.integers(1, 30)),
)


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=25, deadline=None)
@given(data=st.data(), law=LAWS, seed=st.integers(0, 2**31))
def test_anything(isa: str, data: st.DataObject, law: Law, seed: int) -> None:
    draw = data.draw
    kv = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    dim = draw(st.sampled_from([2, 6, 10, 32, 64, 80, 128]))
    shape = Shape(
        law=law,
        block=draw(st.integers(1, 20)),
        heads=draw(st.integers(1, 2)),
        shared=draw(st.integers(1, 8)),
        dim=dim,
        value_dim=draw(st.sampled_from([dim, 32, 34])),
        kv=kv,
        q=draw(st.sampled_from([torch.float32, kv])),
        requests=draw(st.integers(1, 3)),
        longest=draw(st.sampled_from([0, 40, 90])),
        chunk=draw(st.sampled_from([1, 3, 20, 45])),
        ring=draw(st.booleans()),
        fewer=draw(st.booleans()),
    )
    compare(shape, seed, isa, softcap=draw(st.sampled_from([None, 2.0])), sinks=draw(st.booleans()))


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize(("dim", "shared"), [(256, 4), (512, 2), (128, 7), (80, 3), (48, 5)])
@pytest.mark.parametrize("chunk", [1, 50])
@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16])
def test_sizes_of_real_models(isa: str, dim: int, shared: int, chunk: int, kv: torch.dtype) -> None:
    shape = Shape(
        law=Window(60),
        dim=dim,
        value_dim=dim,
        shared=shared,
        chunk=chunk,
        longest=150,
        requests=2,
        kv=kv,
        q=kv,
    )
    compare(shape, 1, isa)


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("law", [Everything(), SinkWindow(200, 900), Window(900)])
def test_long_contexts_are_cut_between_threads(isa: str, law: Law) -> None:
    for seed in range(2):
        shape = Shape(
            law=law, block=48, heads=2, shared=3, longest=1200, requests=2, kv=torch.bfloat16
        )
        compare(shape, seed, isa, sinks=seed % 2 == 0, threads=3)


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize(
    ("kv", "dim"), [(torch.bfloat16, 96), (torch.bfloat16, 80), (torch.float32, 34)]
)
def test_a_row_depends_on_its_request_only(isa: str, kv: torch.dtype, dim: int) -> None:
    """Each request alone and on one thread gives the bits that it gives in a step, on several."""
    shape = Shape(
        law=Everything(), dim=dim, value_dim=dim, shared=3, longest=1400, requests=4, kv=kv, q=kv
    )
    q, view, _ = make(shape, 7)
    kernels, before = library(isa), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = attend(q, view, scale=0.1, kernels=kernels)
        torch.set_num_threads(1)
        for i in range(shape.requests):
            mine, reads = slice(i, i + 1), view.reads
            per_request = {
                name: getattr(reads, name)[mine] for name in ("rows", "fresh", "pages", "page_rows")
            }
            parts = Parts.of(reads.parts.start[mine], np.array([0, 1]), "cpu")
            alone = replace(reads, parts=parts, **per_request)
            own = {name: made[mine] for name, made in view.fresh.items()}
            one = attend(q[mine], replace(view, reads=alone, fresh=own), scale=0.1, kernels=kernels)
            assert torch.equal(one, together[mine])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", levels())
def test_scores_of_any_size(isa: str) -> None:
    q, view, _ = make(Shape(law=Everything(), longest=90, chunk=20), 4)
    for factor in (1e-20, 1e4, 1e18):
        fast = attend(q * factor, view, scale=1.0, kernels=library(isa))
        slow = oracle(q * factor, view, scale=1.0)
        torch.testing.assert_close(fast.double(), slow, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("chunk", [1, 40])
def test_bfloat16_is_no_worse_than_in_torch(isa: str, chunk: int) -> None:
    """torch rounds scores, weights and sums of bfloat16 heads to bfloat16; errors are root mean
    squares over a step.
    """
    shape = Shape(
        law=Everything(), longest=200, chunk=chunk, shared=4, kv=torch.bfloat16, q=torch.bfloat16
    )
    q, view, _ = make(shape, 2)
    slow, parts = oracle(q, view, scale=0.5), view.reads.parts
    fast = attend(q, view, scale=0.5, kernels=library(isa))
    plain = torch.empty_like(fast)
    for token, request in enumerate(parts.query_requests.tolist()):
        seen = range(int(parts.query_positions[token]) + 1)
        pairs = [_entry(view, request, p) for p in seen]
        k, v = (torch.stack([pair[part][0] for pair in pairs]).bfloat16() for part in ("k", "v"))
        plain[token] = torch.softmax((q[token] @ k.T).float() * 0.5, dim=-1).bfloat16() @ v
    errors = [(one.double() - slow).square().mean().sqrt() for one in (fast, plain)]
    assert errors[0] <= errors[1] * 1.02


@pytest.mark.parametrize("isa", levels())
def test_a_nan_that_is_read_shows(isa: str) -> None:
    for chunk in (1, 20):
        q, view, _ = make(Shape(law=Everything(), longest=90, chunk=chunk, shared=4), 4)
        q[-1] = float("nan")
        out = attend(q, view, scale=1.0, kernels=library(isa))
        assert out[-1].isnan().all() and not out[:-1].isnan().any()


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("chunk", [1, 40])
def test_offsets_beyond_31_bits(isa: str, chunk: int) -> None:
    """Two pages more than 2^33 bytes apart, in memory that is reserved and hardly touched."""
    size, block, dim = 5 << 31, 16, 32
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve)
    arena = torch.frombuffer(memory, dtype=torch.bfloat16)
    unit = 128
    data = arena.as_strided(
        ((arena.numel() - block * dim) // unit, 1, block, dim), (unit, block * dim, dim, 1)
    )
    last = data.shape[0] - 1
    pages = np.array([[0, last // 2, last]], dtype=np.int32)
    for page in pages[0].tolist():
        data[page] = torch.randn(1, block, dim)
    parts = Parts.of(np.array([3 * block - chunk]), np.array([0, chunk]), "cpu")
    reads = Reads(
        parts=parts,
        law=Everything(),
        table=pages,
        rows=np.array([0]),
        fixed=None,
        turning=0,
        block_tokens=block,
        pages=np.full(chunk, -1, dtype=np.int32),
        page_rows=np.zeros(chunk, dtype=np.int32),
        fresh=np.array([False]),
    )
    stream = Shape(law=Everything(), dim=dim, value_dim=dim, kv=torch.bfloat16).stream
    over = StreamView(stream, {name: FieldView(data) for name in ("k", "v")})
    view = CacheView(over=over, reads=reads, ops=TORCH)
    own = torch.zeros(chunk, 1, dim)
    view.begin(k=own, v=own)
    q = torch.randn(chunk, 4, dim)
    fast = attend(q, view, scale=0.2, kernels=library(isa))
    torch.testing.assert_close(fast.double(), oracle(q, view, scale=0.2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("q", "kv"),
    [
        (torch.float64, torch.float64),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_what_kernels_do_not_take_is_computed_all_the_same(q: torch.dtype, kv: torch.dtype) -> None:
    for seed in range(3):
        queries, view, _ = make(Shape(law=Window(30), chunk=9, kv=torch.float32), seed)
        fields = {name: FieldView(one.data.to(kv)) for name, one in view.fields.items()}
        fresh = {name: made.to(kv) for name, made in view.fresh.items()}
        other = replace(view, over=StreamView(view.over.stream, fields), fresh=fresh)
        made = attend(queries.to(q), other, scale=0.2)
        assert made.dtype == q
        slow = oracle(queries.to(q), other, scale=0.2)
        close = {torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 2e-2}[q]
        torch.testing.assert_close(made.double(), slow, atol=close, rtol=close)
