"""Index scores and choices against the slow ones, on every instruction set this machine has: every
format of keys, odd tables, ragged lengths, ties, and NaN wherever nothing is to be read.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.indexer import choose, index_scores
from octavo.kernels.library import levels, library
from tests.kernels import slow
from tests.kernels.pages import FORMATS, pages

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from([name for name in FORMATS if name.startswith("key")]),
    dim=st.sampled_from([2, 8, 16, 64, 128]),
    heads=st.sampled_from([1, 3, 16, 20, 64, 70]),
    per_block=st.integers(1, 20),
    visible=st.lists(st.integers(0, 130), min_size=1, max_size=3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)
def test_scores(
    isa: str,
    form: str,
    dim: int,
    heads: int,
    per_block: int,
    visible: list[int],
    threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, rows, entries = pages(form, dim, per_block=per_block, lengths=visible, seed=seed)
    q = torch.randn(len(visible), heads, dim, generator=generator)
    q = q.bfloat16() if seed % 2 else q
    weights = torch.randn(len(visible), heads, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = index_scores(
            q, weights, keys, rows, torch.tensor(visible), length=140, kernels=library(isa)
        )
    finally:
        torch.set_num_threads(before)
    for i, seen in enumerate(visible):
        wanted = slow.index_scores(q[i], weights[i], entries[i][:seen])
        torch.testing.assert_close(
            found[i, :seen].double(), wanted, atol=2e-4 * dim**0.5, rtol=1e-4
        )


@pytest.mark.parametrize("isa", levels())
def test_long_contexts_are_cut(isa: str) -> None:
    visible = [9001, 1, 4097]
    keys, rows, entries = pages("key_bfloat16", 16, per_block=64, lengths=visible, seed=1)
    q, weights = torch.randn(3, 5, 16), torch.randn(3, 5)
    found = index_scores(
        q, weights, keys, rows, torch.tensor(visible), length=9001, kernels=library(isa)
    )
    for i, seen in enumerate(visible):
        wanted = slow.index_scores(q[i], weights[i], entries[i])
        torch.testing.assert_close(found[i, :seen].double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", levels())
def test_a_score_does_not_depend_on_its_neighbours(isa: str) -> None:
    """So that chunks, batches and prefix hits choose alike."""
    keys, rows, _ = pages("key_float32", 64, per_block=8, lengths=[200], seed=3)
    q, weights = torch.randn(1, 7, 64), torch.randn(1, 7)
    whole = index_scores(
        q, weights, keys, rows, torch.tensor([200]), length=200, kernels=library(isa)
    )
    for seen in (1, 5, 47, 199):
        part = index_scores(
            q, weights, keys, rows, torch.tensor([seen]), length=200, kernels=library(isa)
        )
        assert torch.equal(part[0, :seen], whole[0, :seen])


@pytest.mark.parametrize("isa", levels())
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_choice(isa: str, data: st.DataObject, seed: int) -> None:
    length, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    visible = data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3))
    scores = torch.randn(len(visible), length, generator=torch.Generator().manual_seed(seed))
    kind = data.draw(st.sampled_from(["any", "ties", "zeros", "close", "huge"]))
    scores = _shaped(scores, kind)
    for i, seen in enumerate(visible):
        scores[i, seen:] = float("nan")
    found = choose(scores.clone(), torch.tensor(visible), k, kernels=library(isa))
    assert found.shape == (len(visible), min(k, length))
    for i, seen in enumerate(visible):
        wanted = slow.choose(scores[i, :seen].tolist(), k)
        assert found[i].tolist() == wanted + [-1] * (found.shape[1] - len(wanted))


def _shaped(scores: Tensor, kind: str) -> Tensor:
    if kind == "ties":
        return scores.round()
    if kind == "zeros":
        return torch.where(scores > 1, scores, torch.where(scores > 0, 0.0, -0.0))
    if kind == "close":
        return 1 + scores * 1e-6
    return scores * 1e38 if kind == "huge" else scores
