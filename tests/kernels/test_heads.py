"""Products with a matrix per head against the slow ones, on every instruction set this machine
has.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.heads import by_head, suits
from octavo.kernels.library import levels, library
from octavo.ops.oracles import products as oracles

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(1, 9),
    heads=st.integers(1, 3),
    inner=st.sampled_from([16, 48, 128]),
    outer=st.sampled_from([16, 80, 512]),
    flipped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_products(
    isa: str,
    count: int,
    heads: int,
    inner: int,
    outer: int,
    flipped: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(heads, count, 2 * inner).to(dtype).transpose(0, 1)[..., inner:]
    both = torch.randn(heads, 3 * (outer if flipped else inner), inner if flipped else outer).to(
        dtype
    )
    weight = both[:, (outer if flipped else inner) : 2 * (outer if flipped else inner)]
    assert suits(weight)
    found = by_head(x, weight, flipped=flipped, kernels=library(isa))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    wanted = oracles.project_heads(weight, flipped, x)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance * inner**0.5, rtol=tolerance)


def test_what_suits() -> None:
    weight = torch.zeros(2, 16, 32)
    assert suits(weight) and suits(weight.bfloat16())
    assert not suits(weight.double()) and not suits(weight.mT) and not suits(torch.zeros(2, 8, 32))
