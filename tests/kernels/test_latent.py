"""Attention over shared entries against the slow one, on every instruction set this machine has:
every format, chosen entries and dense ones, windows beside the pages, sinks, odd tables, contexts
cut between threads, NaN where nothing is to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.latent import Near, latent_attention
from octavo.kernels.library import levels, library
from tests.kernels import slow
from tests.kernels.pages import FORMATS, pages

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a call. lengths: entries that each query sees. k: entries that it chooses of them. window:
    most rows near it.
    """

    form: str = "latent_float32"
    lengths: tuple[int, ...] = (50,)
    dim: int = 40
    rope: int = 4
    heads: int = 4
    per_block: int = 8
    k: int | None = None
    window: int = 0
    sinks: bool = False
    q: torch.dtype = torch.float32


def compare(shape: Shape, seed: int, isa: str, threads: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, value_dim = (
        len(shape.lengths),
        shape.dim - shape.rope if "latent" in shape.form else shape.dim,
    )
    entries, rows, made = pages(
        shape.form,
        shape.dim,
        rope=shape.rope,
        per_block=shape.per_block,
        lengths=shape.lengths,
        seed=seed,
    )
    q = torch.randn(count, shape.heads, shape.dim, generator=generator).to(shape.q)
    seen, keywords = list(made), dict[str, Any](scale=shape.dim**-0.5)
    visible = torch.tensor(shape.lengths)
    if shape.k is not None:
        chosen = torch.full((count, shape.k), -1)
        for i, own in enumerate(made):
            numbers = torch.randperm(len(own), generator=generator)[: shape.k].sort().values
            chosen[i, : len(numbers)] = numbers
            seen[i], visible[i] = own[numbers], len(numbers)
        keywords["chosen"] = chosen
    if shape.window:
        near, runs = _near(shape, generator)
        keywords["near"] = near
        seen = [torch.cat((run, own)) for run, own in zip(runs, seen, strict=True)]
    if shape.sinks:
        keywords["sinks"] = torch.randn(shape.heads, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = latent_attention(
            q, entries, rows, visible, value_dim=value_dim, kernels=library(isa), **keywords
        )
    finally:
        torch.set_num_threads(before)
    for i, own in enumerate(seen):
        if len(own) or shape.sinks:
            right = slow.attention(
                q[i], own, value_dim, scale=keywords["scale"], sinks=keywords.get("sinks")
            )
            largest = float(own.abs().max()) if len(own) else 1.0
            tolerance = TOLERANCE[shape.q] * max(1.0, largest)
            torch.testing.assert_close(
                fast[i].double(), right, atol=tolerance, rtol=TOLERANCE[shape.q]
            )


def _near(shape: Shape, generator: torch.Generator) -> tuple[Near, list[Tensor]]:
    """Two runs of rows for each query, rubbish between them."""
    rows = torch.full((len(shape.lengths) * (2 * shape.window + 2), shape.dim), float("nan"))
    first, count = (
        torch.zeros(len(shape.lengths), 2, dtype=torch.long),
        torch.zeros(len(shape.lengths), 2, dtype=torch.long),
    )
    runs = []
    for i in range(len(shape.lengths)):
        own = []
        for run in range(2):
            first[i, run] = i * (2 * shape.window + 2) + run * (shape.window + 1)
            count[i, run] = torch.randint(0, shape.window + 1, (1,), generator=generator)
            own.append(torch.randn(int(count[i, run]), shape.dim, generator=generator).bfloat16())
            rows[int(first[i, run]) : int(first[i, run] + count[i, run])] = own[-1]
        runs.append(torch.cat(own).float())
    return Near(
        rows=rows if shape.q == torch.float32 else rows.bfloat16(), first=first, count=count
    ), runs


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_anything(isa: str, data: st.DataObject, seed: int) -> None:
    draw = data.draw
    rope = draw(st.sampled_from([2, 4, 16]))
    shape = Shape(
        form=draw(st.sampled_from([name for name in FORMATS if not name.startswith("key")])),
        lengths=tuple(draw(st.lists(st.integers(0, 150), min_size=1, max_size=3))),
        dim=rope + draw(st.sampled_from([2, 20, 32, 64, 130])),
        rope=rope,
        heads=draw(st.sampled_from([1, 4, 7, 16, 20, 70])),
        per_block=draw(st.integers(1, 20)),
        k=draw(st.sampled_from([None, 1, 30, 100])),
        window=draw(st.sampled_from([0, 1, 40])),
        sinks=draw(st.booleans()),
        q=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    compare(shape, seed, isa, threads=draw(st.sampled_from([1, 3])))


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("form", [name for name in FORMATS if not name.startswith("key")])
def test_sizes_of_real_models(isa: str, form: str) -> None:
    shape = Shape(
        form=form,
        dim=576 if "latent" in form else 512,
        rope=64,
        heads=64,
        per_block=64,
        lengths=(700, 90),
        k=512,
    )
    compare(shape, 1, isa)


@pytest.mark.parametrize("isa", levels())
def test_long_contexts_are_cut_between_threads(isa: str) -> None:
    for seed, k in enumerate([None, 800]):
        compare(Shape(lengths=(2000, 3, 1100), k=k, sinks=True, window=20), seed, isa, threads=3)


@pytest.mark.parametrize("isa", levels())
def test_windows_alone(isa: str) -> None:
    rows, q = torch.randn(9, 8), torch.randn(1, 3, 8)
    near = Near(rows=rows, first=torch.tensor([[2, 0]]), count=torch.tensor([[5, 0]]))
    found = latent_attention(
        q,
        None,
        torch.zeros(1).long(),
        None,
        scale=1.0,
        value_dim=8,
        near=near,
        kernels=library(isa),
    )
    torch.testing.assert_close(
        found[0].double(), slow.attention(q[0], rows[2:7], 8, scale=1.0), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("isa", levels())
def test_a_nan_that_is_read_shows(isa: str) -> None:
    entries, rows, _ = pages("kv_float32", 16, per_block=8, lengths=[70, 70], seed=1)
    q = torch.randn(2, 4, 16)
    q[1, 2] = float("nan")
    out = latent_attention(
        q, entries, rows, torch.tensor([70, 70]), scale=1.0, value_dim=16, kernels=library(isa)
    )
    assert out[1, 2].isnan().all() and not out[0].isnan().any() and not out[1, 3].isnan().any()
