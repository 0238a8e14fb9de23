"""Products of few rows against the slow ones, on every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.library import levels, library
from octavo.kernels.linear import EMULATING, GATES, Matrices, gated, linear
from octavo.ops.activation import Gating
from octavo.ops.oracles import products as oracles

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 33),
    size=st.sampled_from([32, 96, 640]),
    outputs=st.sampled_from([1, 7, 33, 256, 700]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    activation=st.sampled_from([None, *GATES]),
)
def test_linear_and_gated(
    isa: str,
    seed: int,
    rows: int,
    size: int,
    outputs: int,
    dtype: torch.dtype,
    bias: bool,
    activation: str | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight = some(rows, 2 * size)[:, size:], some(outputs, size) / size**0.5
    if activation is None:
        b = some(outputs) if bias else None
        fast, slow = linear(x, weight, b, kernels=library(isa)), oracles.project(weight, b, x)
    else:
        up = some(outputs, size) / size**0.5
        fast, slow = (
            gated(x, weight, up, activation, kernels=library(isa)),
            oracles.gated(weight, up, Gating(activation=activation), (None, None), x),
        )
    assert fast.dtype == dtype and fast.shape == (rows, outputs)
    torch.testing.assert_close(fast.double(), slow, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 1024])
def test_many_rows_give_each_what_few_give(isa: str, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, weight, up = (
        torch.randn(count, size, generator=generator).to(dtype) for count in (515, 101, 101)
    )
    many, both = (
        linear(x, weight, kernels=library(isa)),
        gated(x, weight, up, "silu", kernels=library(isa)),
    )
    torch.testing.assert_close(
        many.double(),
        oracles.project(weight, None, x),
        atol=1e-2 * size**0.5,
        rtol=TOLERANCE[dtype],
    )
    for part in (slice(0, 1), slice(2, 4), slice(255, 258), slice(508, 515)):
        assert torch.equal(many[part], linear(x[part], weight, kernels=library(isa)))
        assert torch.equal(both[part], gated(x[part], weight, up, "silu", kernels=library(isa)))


@pytest.mark.parametrize("isa", levels())
def test_extremes_stay_what_they_are(isa: str) -> None:
    x = torch.eye(32)[:4].contiguous()
    weight = torch.tensor([[-1e30, -90.0, 0.0, 90.0]]).T.repeat(1, 32).contiguous()
    weight[0, 1] = float("nan")
    for activation in GATES:
        fast = gated(x, weight, torch.ones_like(weight), activation, kernels=library(isa))
        assert fast[0].isnan().any() and torch.isfinite(fast[2:, 1:]).all()
        torch.testing.assert_close(
            fast[2, 1:], torch.tensor([0.0, 0.0, 90.0]), atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("isa", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_several_matrices_lie_side_by_side(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(260, 64, generator=generator).to(dtype)
    weights = [torch.randn(count, 64, generator=generator).to(dtype) for count in (1, 900, 33)]
    biases = [None, torch.randn(900, generator=generator).to(dtype), None]
    for rows in (1, 2, 7, 260):
        made = Matrices(*weights, biases=biases, kernels=library(isa))(x[:rows])
        alone = [
            linear(x[:rows], *pair, kernels=library(isa))
            for pair in zip(weights, biases, strict=True)
        ]
        assert torch.equal(made, torch.cat(alone, dim=1))


def test_what_is_left_to_torch() -> None:
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    assert Matrices(weight).possible and Matrices(weight).takes(x)
    assert not Matrices(weight[:, :40]).possible and not Matrices(weight[:, :32]).possible
    assert not Matrices(weight.double()).possible and not Matrices(weight).takes(x.bfloat16())
    assert not Matrices(weight).takes(torch.randn(33, 64))
    many = Matrices(weight.bfloat16()).takes(torch.randn(33, 64).bfloat16())
    assert many == (getattr(library(), "isa", None) in EMULATING)
    assert not Matrices(weight).takes(torch.randn(0, 64))
    assert not Matrices(weight, up=weight, activation="relu2").possible
