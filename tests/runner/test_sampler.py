"""The sampler: greedy, cuts, and draws that depend on nothing but their own request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.runner.sampler import Choice, _inverse, draw, sample, uniform
from octavo.sched.sampling import SamplingParams
from tests.runner import slow
from tests.runner.slow import logits_of

VOCAB = 3000
GREEDY = SamplingParams(temperature=0)


def choices_of(params: list[SamplingParams], **more: Any) -> list[Choice]:
    """One choice per row, each of a request of its own at a place of its own."""
    return [
        Choice(row=i, request_id=f"r{i}", params=one, place=3 * i % 7, **more)
        for i, one in enumerate(params)
    ]


def many(params: SamplingParams, logits: torch.Tensor, count: int) -> np.ndarray:
    """``count`` draws of one request from one row of logits."""
    choices = [Choice(row=0, request_id="a", params=params, place=place) for place in range(count)]
    return np.array(sample(logits, choices, seed=1))


# -- what is chosen --------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest() -> None:
    logits = logits_of(3, VOCAB)
    assert sample(logits, choices_of([GREEDY] * 3), seed=0) == logits.argmax(-1).tolist()


def test_plain_is_what_needs_no_logits_but_the_largest() -> None:
    assert GREEDY.plain and replace(GREEDY, seed=3, top_k=5, max_tokens=9).plain
    for change in (
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 2.0},
    ):
        assert not replace(GREEDY, **change).plain


def test_no_choices_no_tokens() -> None:
    assert sample(torch.empty(0, 5), [], seed=0) == []


@st.composite
def options(draw: st.DrawFn, vocab: int) -> SamplingParams:
    off = st.just
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5])),
        top_k=draw(st.one_of(off(0), st.integers(1, vocab + 3))),
        top_p=draw(st.one_of(off(1.0), st.floats(0.01, 0.99))),
        min_p=draw(st.one_of(off(0.0), st.floats(0.001, 1.0))),
        seed=draw(st.one_of(st.none(), st.integers(-5, 2**70))),
    )


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), vocab=st.sampled_from([1, 2, 7, 70, 1100]), steps=st.sampled_from([0.0, 0.5])
)
def test_every_token_is_the_one_the_slow_sampler_draws(
    data: st.DataObject, vocab: int, steps: float
) -> None:
    params = data.draw(st.lists(options(vocab), min_size=1, max_size=5))
    logits, choices = (
        logits_of(len(params), vocab, seed=data.draw(st.integers(0, 99)), steps=steps),
        choices_of(params),
    )
    for token, choice in zip(sample(logits, choices, seed=4), choices, strict=True):
        row = logits[choice.row].double().tolist()
        if choice.params.greedy:
            assert token == slow.ranking(row)[0]
            continue
        expected = slow.distribution(row, choice.params)
        assume(expected.margin > 1e-5)
        assert expected.allows(token, draw(choice, 4))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7, temperature=1.7),
        SamplingParams(min_p=0.2, temperature=0.8),
        SamplingParams(top_k=30, top_p=0.8),
        SamplingParams(min_p=0.02, top_k=12, top_p=0.9, temperature=1.3),
        SamplingParams(min_p=0.05, top_p=0.9),
    ],
)
def test_cuts_keep_what_those_of_transformers_keep(params: SamplingParams) -> None:
    logits = logits_of(1, 90, seed=8)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    kept = torch.softmax(warpers(torch.zeros(1, 0, dtype=torch.long), logits.clone()), dim=-1)[0]
    got = np.bincount(many(params, logits, 6000), minlength=90) / 6000
    assert (got[(kept == 0).numpy()] == 0).all()
    assert (got[(kept > 0.01).numpy()] > 0).all()
    assert np.abs(got - kept.numpy()).max() < 0.02
    uncut = slow.distribution(
        logits[0].double().tolist(), SamplingParams(temperature=params.temperature)
    ).probabilities
    assert np.abs(got - np.array(uncut)).max() > 0.02, "else the cut would not show"


def test_a_nucleus_wider_than_the_first_width_is_found() -> None:
    flat = torch.zeros(1, VOCAB)
    drawn = many(SamplingParams(top_p=0.9), flat, 1500)
    assert len(set(drawn.tolist())) > 1000
    assert 1024 <= drawn.max() < 2701


def test_ties_at_the_border_of_a_cut_go_to_lower_ids() -> None:
    flat = torch.zeros(1, VOCAB)
    assert set(many(SamplingParams(top_k=5), flat, 200).tolist()) == {0, 1, 2, 3, 4}
    assert many(SamplingParams(top_k=1500), flat, 400).max() < 1500


def test_top_k_one_and_min_p_one_are_greedy() -> None:
    logits = logits_of(1, VOCAB)
    for params in (
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_p=0),
        SamplingParams(top_p=0, top_k=7, temperature=2),
        SamplingParams(temperature=1e-6),
    ):
        assert set(many(params, logits, 50).tolist()) == {int(logits.argmax())}


def test_top_k_beyond_the_vocabulary_is_no_cut() -> None:
    assert len(set(many(SamplingParams(top_k=10**6), torch.zeros(1, 8), 300).tolist())) == 8


# -- extremes --------------------------------------------------------------------------------------

HARD = [
    SamplingParams(),
    GREEDY,
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e-300),
    SamplingParams(temperature=1e30),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=3),
    SamplingParams(top_k=2000, top_p=1e-9),
    SamplingParams(top_p=0.999999),
    SamplingParams(temperature=1e-6, min_p=0.5, top_k=7, top_p=0.3),
]


@pytest.mark.parametrize("params", HARD, ids=range(len(HARD)))
def test_only_possible_tokens_are_chosen(params: SamplingParams) -> None:
    only = torch.full((1, VOCAB), float("-inf"))
    only[0, 77] = -3e38
    assert set(many(params, only, 50).tolist()) == {77}
    two = only.clone()
    two[0, [5, 2999]] = torch.tensor([1e38, 1e38])
    assert set(many(params, two, 100).tolist()) <= {5, 2999}
    wild = logits_of(1, VOCAB, seed=3) * 1e37
    wild[0, ::2] = float("-inf")
    assert (many(params, wild, 50) % 2 == 1).all()


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_row_without_any_possible_token_gives_some_token_and_harms_no_other(value: float) -> None:
    logits = logits_of(len(HARD) + 1, 40)
    logits[: len(HARD)] = value
    tokens = sample(logits, choices_of([*HARD, SamplingParams(seed=1)]), seed=0)
    assert all(0 <= token < 40 for token in tokens)
    last = Choice(
        row=0,
        request_id="x",
        params=SamplingParams(seed=1),
        place=choices_of([GREEDY] * 11)[-1].place,
    )
    assert tokens[-1:] == sample(logits[-1:], [last], seed=0)


def test_points_on_a_border_never_choose_an_impossible_token() -> None:
    chances = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    points = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert _inverse(chances, points).tolist() == [1, 1, 3, 3]


# -- draws -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([5, 80, 1500]), steps=st.sampled_from([0.0, 1.0]))
def test_a_request_draws_the_same_whatever_else_is_in_the_batch(
    data: st.DataObject, vocab: int, steps: float
) -> None:
    params = data.draw(st.lists(options(vocab), min_size=2, max_size=7))
    logits, choices = (
        logits_of(len(params), vocab, seed=data.draw(st.integers(0, 99)), steps=steps),
        choices_of(params),
    )
    together = sample(logits, choices, seed=11)
    for token, choice in zip(together, choices, strict=True):
        alone = Choice(
            row=0, request_id=choice.request_id, params=choice.params, place=choice.place
        )
        assert sample(logits[choice.row : choice.row + 1], [alone], seed=11) == [token]
    order = data.draw(st.permutations(range(len(params))))
    assert sample(logits, [choices[i] for i in order], seed=11) == [together[i] for i in order]


def test_continuations_of_a_seeded_request_differ_and_come_again() -> None:
    logits, params = logits_of(2, VOCAB), SamplingParams(seed=9)
    branches = [
        Choice(row=1, request_id=f"a#{n}", params=params, place=0, branch=n) for n in range(8)
    ]
    tokens = sample(logits, branches, seed=0)
    assert len(set(tokens)) > 5
    again = Choice(row=0, request_id="of another name", params=params, place=0, branch=5)
    assert sample(logits[1:], [again], seed=123) == [tokens[5]]


def test_seeds_ids_branches_and_places_decide() -> None:
    def at(params: SamplingParams, seed: int, name: str, place: int, branch: int = 0) -> float:
        return draw(Choice(row=0, request_id=name, params=params, place=place, branch=branch), seed)

    seeded, free = SamplingParams(seed=1), SamplingParams()
    assert at(seeded, 0, "a", 3) == at(seeded, 99, "b", 3)
    assert len({at(seeded, 0, "a", 3), at(seeded, 0, "a", 4), at(seeded, 0, "a", 3, branch=1)}) == 3
    assert at(free, 0, "a", 3) == at(free, 0, "a", 3)
    assert (
        len({at(free, 0, "a", 3), at(free, 1, "a", 3), at(free, 0, "b", 3), at(free, 0, "a", 4)})
        == 4
    )
    assert 0 <= uniform(-5, 2**70, 0) < 1


def test_numbers_of_seeded_requests_stay_what_they_were() -> None:
    numbers = [
        draw(Choice(row=0, request_id="a", params=SamplingParams(seed=3), place=place), 0)
        for place in range(3)
    ]
    assert numbers == [0.9342820204007575, 0.7580892609837582, 0.3322874946230707]


def test_streams_and_seeds_beyond_int64_stay_apart() -> None:
    draws = [uniform(0, 2**63 + n, 0) for n in range(6)] + [
        uniform(2**64 - 1 - n, 0, 0) for n in range(6)
    ]
    assert len(set(draws)) == len(draws)
