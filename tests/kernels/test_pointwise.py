"""Norms, rotation and stores against the slow ones, on every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.library import levels, library
from octavo.kernels.pointwise import (
    STYLES,
    argmax,
    normed,
    normed_rotated,
    rotated,
    scatter,
)
from octavo.ops.oracles import pointwise as oracles

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    style=st.sampled_from(sorted(STYLES)),
    size=st.integers(1, 70),
    dtype=DTYPES,
)
def test_norms(isa: str, seed: int, style: str, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(5, 3, 2 * size, generator=generator) * 3 + 1).to(dtype)[..., :size]
    weight = None if style == "unit" else torch.randn(size, generator=generator).to(dtype)
    fast = normed(x, weight, 1e-5, style, kernels=library(isa))
    slow = oracles.norm(x, weight, 1e-5, style)
    assert fast.dtype == dtype
    torch.testing.assert_close(
        fast.double(), slow, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    half=st.integers(1, 40),
    rest=st.integers(0, 20),
    dtype=DTYPES,
    interleaved=st.booleans(),
)
def test_rotation(
    isa: str, seed: int, half: int, rest: int, dtype: torch.dtype, interleaved: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(5, 2 * half + rest, 3, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        .contiguous()
    )
    cosine, sine = (torch.randn(5, 1, 2 * half, generator=generator).to(dtype) for _ in "cs")
    fast = rotated(x[:, 1:], cosine, sine, interleaved=interleaved, kernels=library(isa))
    slow = oracles.rotate(x[:, 1:], cosine, sine, interleaved=interleaved)
    torch.testing.assert_close(
        fast.double(), slow, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    weight = torch.randn(2 * half + rest, generator=generator).to(dtype)
    for style in ("scale", "offset"):
        both = normed_rotated(
            x, weight, 1e-5, style, cosine, sine, interleaved=interleaved, kernels=library(isa)
        )
        one = normed(x, weight, 1e-5, style, kernels=library(isa))
        assert torch.equal(
            both, rotated(one, cosine, sine, interleaved=interleaved, kernels=library(isa))
        )


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_scatter(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Pages of one field between others, heads one behind the other.
    fast = torch.zeros(7, 2, 3, 4, 5, dtype=dtype)
    slow = fast.clone()
    values = torch.randint(0, 200, (6, 3, 9), generator=generator).to(dtype)[:, :, 2:7]
    pages, rows, tokens = (
        torch.tensor([6, 0, 3, 3]),
        torch.tensor([0, 3, 1, 2]),
        torch.tensor([5, 0, 1, 1]),
    )
    scatter(
        [fast[:, 1], fast[:, 0]], pages, rows, [values, values + 1], tokens, kernels=library(isa)
    )
    slow[:, 1][pages, :, rows] = values[tokens]
    slow[:, 0][pages, :, rows] = values[tokens] + 1
    assert torch.equal(fast, slow)


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3),
    size=st.sampled_from([1, 5, 16, 100, 70_001]),
    dtype=DTYPES,
    few=st.booleans(),
)
def test_argmax(isa: str, seed: int, rows: int, size: int, dtype: torch.dtype, few: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    # Few values make ties, and some rows have nothing that is finite.
    x = x.round() if few else x
    x[0] = x[0].masked_fill(x[0] < 1, -torch.inf)
    found = argmax(x, kernels=library(isa))
    assert found.tolist() == [row.tolist().index(max(row.tolist())) for row in x]


@pytest.mark.parametrize("isa", levels())
def test_argmax_passes_over_what_is_no_number(isa: str) -> None:
    x = torch.full((2, 40), torch.nan)
    x[1, 33] = -1.0
    assert argmax(x, kernels=library(isa)).tolist() == [0, 33]
