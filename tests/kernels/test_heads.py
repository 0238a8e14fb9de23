"""Products with a matrix per head against the slow ones, on every instruction set this machine
has.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import sparse_reference as reference
from octavo.kernels.heads import by_head, takes
from octavo.kernels.library import levels, library

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
    assert takes(x, weight)
    found = by_head(x, weight, flipped=flipped, kernels=library(isa))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    wanted = reference.by_head(x, weight, flipped=flipped)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance * inner**0.5, rtol=tolerance)


def test_what_is_taken() -> None:
    weight = torch.zeros(2, 16, 32)
    assert takes(torch.zeros(1, 2, 16), weight) and not takes(torch.zeros(33, 2, 16), weight)
    assert not takes(torch.zeros(1, 2, 16), weight.mT) and not takes(
        torch.zeros(1, 2, 16).bfloat16(), weight
    )
    assert not takes(torch.zeros(1, 2, 8), torch.zeros(2, 8, 32))
