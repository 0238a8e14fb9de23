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

from octavo.kernels import reference
from octavo.kernels.attention import Reads, paged_attention, takes
from octavo.kernels.library import levels, library
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Window

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a step. kv, q: dtypes. longest: tokens of a past. chunk: most tokens of a request in the
    step.
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


def make(shape: Shape, seed: int) -> tuple[tuple[Any, ...], Tensor]:
    """(arguments of ``paged_attention``, sinks). What the law does not need is NaN."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    law, block, count = shape.law, shape.block, shape.requests
    start = rng.integers(0, shape.longest + 1, count)
    length = (
        rng.integers(0, shape.chunk + 1, count)
        if shape.chunk > 1
        else np.ones(count, dtype=np.int64)
    )
    fresh = rng.random(count) < 0.5
    fixed, turning = None, 0
    columns = (shape.longest + shape.chunk) // block + 2
    if shape.ring and law.prefix is not None:
        fixed = -(-law.prefix // block)
        # Wide enough for what a write-first step may hold at once.
        turning = (law.span + shape.chunk) // block + 2
        columns = fixed + turning
    pages = (
        rng.permutation(count * columns * 2)[: count * columns]
        .reshape(count, columns)
        .astype(np.int32)
    )
    rows = rng.permutation(count).astype(np.int64)
    query_start = np.concatenate(([0], np.cumsum(length)))
    positions = np.repeat(start - query_start[:-1], length) + np.arange(query_start[-1])
    unit = 3

    def field(width: int) -> Tensor:
        # Pages begin at any unit and overlap their neighbours', as in an arena; only every
        # `size`-th is used.
        size = shape.heads * block * width
        flat = torch.full((pages.size * 2 * size + unit,), float("nan"), dtype=shape.kv)[unit:]
        return flat.as_strided(
            (pages.size * 2, shape.heads, block, width), (size, block * width, width, 1)
        )

    fields = field(shape.dim), field(shape.value_dim)
    reads = Reads(
        table=torch.from_numpy(pages),
        rows=torch.from_numpy(rows),
        fixed=fixed,
        turning=turning,
        block_tokens=block,
        query_start=torch.from_numpy(query_start),
        start=torch.from_numpy(start),
        fresh=torch.from_numpy(fresh),
        first=torch.from_numpy(np.asarray(law.first(positions), dtype=np.int64)),
        prefix=law.prefix,
    )
    total = int(query_start[-1])
    own = tuple(
        torch.randn(total, shape.heads, w, generator=generator).to(shape.kv)
        for w in (shape.dim, shape.value_dim)
    )
    for i in range(count):
        wanted = [p for a, b in law.needs(int(start[i])) for p in range(a, b)]
        written = [] if fresh[i] else list(range(start[i], start[i] + length[i]))
        for position in (*wanted, *written):
            column, row = divmod(position, block)
            if fixed is not None and column >= fixed:
                column = fixed + (column - fixed) % turning
            for one in fields:
                one[int(pages[rows[i], column]), :, row] = torch.randn(
                    shape.heads, one.shape[3], generator=generator
                ).to(shape.kv)
        if not fresh[i]:
            for one in own:
                one[int(reads.query_start[i]) : int(reads.query_start[i + 1])] = float("nan")
    heads = shape.heads * shape.shared
    q = torch.randn(total, 2 * heads, shape.dim, generator=generator).to(shape.q)[:, heads:]
    return (q, *fields, *own, reads), torch.randn(heads, generator=generator)


def compare(
    shape: Shape,
    seed: int,
    isa: str,
    *,
    softcap: float | None = None,
    sinks: bool = False,
    threads: int = 1,
) -> None:
    arguments, logits = make(shape, seed)
    rule: dict[str, Any] = {
        "scale": shape.dim**-0.5,
        "softcap": softcap,
        "sinks": logits if sinks else None,
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = paged_attention(*arguments, **rule, kernels=library(isa))
    finally:
        torch.set_num_threads(before)
    slow = reference.paged_attention(*arguments, **rule)
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
    (q, keys, values, own_keys, own_values, reads), _ = make(shape, 7)
    kernels, before = library(isa), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = paged_attention(
            q, keys, values, own_keys, own_values, reads, scale=0.1, kernels=kernels
        )
        torch.set_num_threads(1)
        for i in range(shape.requests):
            mine = slice(i, i + 1)
            per_request = {
                name: getattr(reads, name)[mine] for name in ("rows", "start", "fresh", "first")
            }
            alone = replace(reads, query_start=torch.tensor([0, 1]), **per_request)
            one = paged_attention(
                q[mine],
                keys,
                values,
                own_keys[mine],
                own_values[mine],
                alone,
                scale=0.1,
                kernels=kernels,
            )
            assert torch.equal(one, together[mine])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", levels())
def test_scores_of_any_size(isa: str) -> None:
    (q, keys, *rest), _ = make(Shape(law=Everything(), longest=90, chunk=20), 4)
    for factor in (1e-20, 1e4, 1e18):
        fast = paged_attention(q * factor, keys, *rest, scale=1.0, kernels=library(isa))
        slow = reference.paged_attention(q * factor, keys, *rest, scale=1.0)
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
    arguments, _ = make(shape, 2)
    q, keys, values, own_keys, own_values, reads = arguments
    slow = reference.paged_attention(*arguments, scale=0.5)
    fast = paged_attention(*arguments, scale=0.5, kernels=library(isa))
    plain = torch.empty_like(fast)
    for token in range(len(q)):
        request = int((reads.query_start <= token).sum()) - 1
        begin = int(reads.query_start[request])
        seen = range(int(reads.start[request]) + token - begin + 1)
        pairs = [
            reference._entry(keys, values, own_keys, own_values, reads, request, begin, p)
            for p in seen
        ]
        k, v = (torch.stack([pair[which][0] for pair in pairs]).bfloat16() for which in (0, 1))
        plain[token] = torch.softmax((q[token] @ k.T).float() * 0.5, dim=-1).bfloat16() @ v
    errors = [(one.double() - slow).square().mean().sqrt() for one in (fast, plain)]
    assert errors[0] <= errors[1] * 1.02


@pytest.mark.parametrize("isa", levels())
def test_a_nan_that_is_read_shows(isa: str) -> None:
    for chunk in (1, 20):
        (q, *rest), _ = make(Shape(law=Everything(), longest=90, chunk=chunk, shared=4), 4)
        q[-1] = float("nan")
        out = paged_attention(q, *rest, scale=1.0, kernels=library(isa))
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
    pages = torch.tensor([[0, last // 2, last]], dtype=torch.int32)
    for page in pages[0].tolist():
        data[page] = torch.randn(1, block, dim)
    start = torch.tensor([3 * block - chunk])
    reads = Reads(
        table=pages,
        rows=torch.tensor([0]),
        fixed=None,
        turning=0,
        block_tokens=block,
        query_start=torch.tensor([0, chunk]),
        start=start,
        fresh=torch.tensor([False]),
        first=torch.zeros(chunk, dtype=torch.int64),
        prefix=None,
    )
    q, own = torch.randn(chunk, 4, dim), torch.zeros(chunk, 1, dim, dtype=torch.bfloat16)
    fast = paged_attention(q, data, data, own, own, reads, scale=0.2, kernels=library(isa))
    slow = reference.paged_attention(q, data, data, own, own, reads, scale=0.2)
    torch.testing.assert_close(fast.double(), slow, atol=1e-4, rtol=1e-4)


def test_what_is_left_to_torch() -> None:
    q, keys = torch.zeros(1, 1, 8), torch.zeros(1, 1, 4, 8)
    assert takes(q, keys) and takes(q, keys.bfloat16()) and takes(q.bfloat16(), keys.bfloat16())
    assert (
        not takes(q.double(), keys.double())
        and not takes(q.half(), keys.half())
        and not takes(q.bfloat16(), keys)
    )
