"""Steps of states against the slow ones, on every instruction set this machine has: any sizes,
shared keys, both decays.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.library import levels, library
from octavo.kernels.recurrent import (
    Places,
    decayed_step,
    decayed_step_in_pages,
    delta_step,
    delta_step_in_pages,
)
from tests.kernels import slow

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

SIZES = st.sampled_from([1, 5, 16, 24, 64, 70, 128])


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 3),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    keys=SIZES,
    values=SIZES,
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)
def test_steps(
    isa: str, count: int, groups: int, shared: int, keys: int, values: int, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    heads = groups * shared
    q, k = torch.randn(2, count, groups, keys).div_(keys**0.5)
    v, beta, decay = (
        torch.randn(count, heads, values),
        torch.rand(count, heads),
        -torch.rand(count, heads) * 3,
    )
    if seed % 2:
        decay[0] = -1000.0
    channels, sharing = (
        -torch.rand(count, heads, keys),
        torch.randn(2 * count, heads, values, keys)[::2],
    )
    matrix, before = torch.randn(count, heads, keys, values), torch.get_num_threads()
    kernels, kept = library(isa), matrix.clone()
    torch.set_num_threads(threads)
    try:
        spaces = decayed_step(q, k, v, decay, sharing, kernels=kernels)
        deltas = delta_step(q, k, v, decay, beta, matrix, kernels=kernels)
        channel_deltas = delta_step(q, k, v, channels, beta, matrix, kernels=kernels)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(matrix, kept), "what is given stays"
    for i in range(count):
        for h in range(heads):
            key = (q[i, h // shared], k[i, h // shared])
            for found, wanted in (
                (spaces, slow.decayed_step(*key, v[i, h], decay[i, h], sharing[i, h])),
                (
                    deltas,
                    slow.delta_step(*key, v[i, h], decay[i, h], beta[i, h], matrix[i, h]),
                ),
                (
                    channel_deltas,
                    slow.delta_step(*key, v[i, h], channels[i, h], beta[i, h], matrix[i, h]),
                ),
            ):
                for made, right in zip(found, wanted, strict=True):
                    torch.testing.assert_close(made[i, h].double(), right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("isa", levels())
def test_from_page_to_page(isa: str) -> None:
    """Into another page, into the same one, and from nothing; all else stays, and what is not there
    is not read.
    """
    torch.manual_seed(0)
    heads, keys, values = 4, 24, 40
    for step in (decayed_step, delta_step):
        shape = (values, keys) if step is decayed_step else (keys, values)
        data = torch.randn(9, heads, 2, *shape)
        data[6] = float("nan")
        kept = data.clone()
        places = Places(
            data=data,
            pages=torch.tensor([1, 4, 6]),
            rows=torch.tensor([1, 0, 0]),
            known=torch.tensor([True, True, False]),
            to_pages=torch.tensor([3, 4, 6]),
            to_rows=torch.tensor([0, 0, 1]),
        )
        inputs = [
            torch.randn(3, 2, keys) * 0.2,
            torch.randn(3, 2, keys) * 0.2,
            torch.randn(3, heads, values),
        ]
        inputs.append(-torch.rand(3, heads))
        before = torch.stack((kept[1, :, 1], kept[4, :, 0], torch.zeros(heads, *shape)))
        if step is decayed_step:
            out, after = decayed_step(*inputs, before, kernels=library(isa))
            found = decayed_step_in_pages(*inputs, places, kernels=library(isa))
        else:
            inputs.append(torch.rand(3, heads))
            out, after = delta_step(*inputs, before, kernels=library(isa))
            found = delta_step_in_pages(*inputs, places, kernels=library(isa))
        assert torch.equal(found, out)
        for request, (page, row) in enumerate(((3, 0), (4, 0), (6, 1))):
            assert torch.equal(data[page, :, row], after[request])
            data[page, :, row] = kept[page, :, row]
        assert torch.equal(data.nan_to_num(7.0), kept.nan_to_num(7.0))
