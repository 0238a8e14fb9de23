"""Steps of states against the slow ones, on every instruction set this machine has: any sizes, shared keys, both decays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import sparse_reference as reference
from octavo.kernels.library import levels, library
from octavo.kernels.recurrent import decayed_step, delta_step, takes

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
def test_steps(isa: str, count: int, groups: int, shared: int, keys: int, values: int, threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    heads = groups * shared
    q, k = torch.randn(2, count, groups, keys).div_(keys**0.5)
    v, beta, decay = torch.randn(count, heads, values), torch.rand(count, heads), -torch.rand(count, heads) * 3
    if seed % 2:
        decay[0] = -1000.0
    channels, sharing = -torch.rand(count, heads, keys), torch.randn(2 * count, heads, values, keys)[::2]
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
                (spaces, reference.decayed_step(*key, v[i, h], decay[i, h], sharing[i, h])),
                (deltas, reference.delta_step(*key, v[i, h], decay[i, h], beta[i, h], matrix[i, h])),
                (channel_deltas, reference.delta_step(*key, v[i, h], channels[i, h], beta[i, h], matrix[i, h])),
            ):
                for made, slow in zip(found, wanted, strict=True):
                    torch.testing.assert_close(made[i, h].double(), slow, atol=2e-5, rtol=2e-5)


def test_what_is_taken() -> None:
    state = torch.zeros(2, 3, 4, 5)
    assert takes(state) and takes(state[::2]) and not takes(state.mT) and not takes(state.double()) and not takes(state[:0])
