"""The sampler: greedy, cuts, and draws that depend on nothing but their own request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.runner.sampler import Choice, draw, sample, uniform
from octavo.sched.sampling import SamplingParams

VOCAB = 3000


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def many(params: SamplingParams, logits: torch.Tensor, count: int) -> np.ndarray:
    """``count`` draws of one request from one row of logits."""
    choices = [Choice(row=0, request_id="a", params=params, place=place) for place in range(count)]
    return np.array(sample(logits, choices, seed=1))


def test_greedy_takes_the_likeliest() -> None:
    logits = logits_of(3)
    assert sample(logits, [SamplingParams(temperature=0)] * 3, list("abc"), [0] * 3, seed=0) == logits.argmax(-1).tolist()


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 5), [], [], [], seed=0) == []


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=4), SamplingParams(top_p=0.6)]
)
def test_frequencies_follow_the_cut_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 1.5]])
    p = torch.softmax(logits[0].double() / params.temperature, -1)
    order = p.argsort(descending=True)
    keep = torch.zeros(6, dtype=torch.bool)
    for place, token in enumerate(order):
        before = float(p[order[:place]].sum())
        keep[token] = (params.top_k <= 0 or place < params.top_k) and before < params.top_p
    want = torch.where(keep, p, 0.0) / p[keep].sum()
    got = np.bincount(many(params, logits, 20000), minlength=6) / 20000
    assert np.abs(got - want.numpy()).max() < 0.015
    assert (got[~keep.numpy()] == 0).all()


def test_top_p_looks_past_its_first_width() -> None:
    flat = torch.zeros(1, VOCAB)
    drawn = many(SamplingParams(top_p=0.9), flat, 4000)
    assert len(set(drawn.tolist())) > 1500
    assert drawn.max() >= 1024


def test_top_k_one_is_greedy() -> None:
    logits = logits_of(1)
    assert set(many(SamplingParams(top_k=1), logits, 50).tolist()) == {int(logits.argmax())}


def test_top_k_beyond_the_vocabulary_is_no_cut() -> None:
    assert len(set(many(SamplingParams(top_k=10**6), torch.zeros(1, 8), 300).tolist())) == 8


MIXED = [
    SamplingParams(seed=3),
    SamplingParams(temperature=0),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, top_p=0.7),
    SamplingParams(top_p=0.5, top_k=50),
    SamplingParams(temperature=3.0),
]


def test_a_request_draws_the_same_whatever_else_is_in_the_batch() -> None:
    logits, ids, lengths = logits_of(len(MIXED)), list("abcdef"), [0, 5, 9, 2, 1, 7]
    together = sample(logits, MIXED, ids, lengths, seed=11)
    alone = [sample(logits[i : i + 1], [MIXED[i]], [ids[i]], [lengths[i]], seed=11)[0] for i in range(len(MIXED))]
    order = [4, 0, 3, 5, 1, 2]
    shuffled = sample(logits[order], [MIXED[i] for i in order], [ids[i] for i in order], [lengths[i] for i in order], seed=11)
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_seeds_ids_and_places_decide() -> None:
    seeded, free = SamplingParams(seed=1), SamplingParams()
    assert draw(seeded, 0, "a", 3) == draw(seeded, 99, "b", 3) != draw(seeded, 0, "a", 4)
    assert draw(free, 0, "a", 3) == draw(free, 0, "a", 3)
    assert len({draw(free, 0, "a", 3), draw(free, 1, "a", 3), draw(free, 0, "b", 3), draw(free, 0, "a", 4)}) == 4
    assert 0 <= uniform(-5, 2**70, 0) < 1


def test_streams_and_seeds_beyond_int64_stay_apart() -> None:
    draws = [uniform(0, 2**63 + n, 0) for n in range(6)] + [uniform(2**64 - 1 - n, 0, 0) for n in range(6)]
    assert len(set(draws)) == len(draws)
