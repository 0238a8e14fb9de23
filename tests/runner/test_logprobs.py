"""Logprobs of tokens and lists of the likeliest, against sorting in Python."""

from __future__ import annotations

from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runner import logits as module
from octavo.runner.logprobs import likeliest, token_logprobs
from tests.runner import slow
from tests.runner.slow import logits_of


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_order_is_by_value_and_then_by_id(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 12))
    special = st.sampled_from(
        [0.0, -0.0, float("inf"), float("-inf"), 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0]
    )
    number = st.one_of(special, st.floats(width=32, allow_nan=False))
    rows = data.draw(
        st.lists(st.lists(number, min_size=vocab, max_size=vocab), min_size=1, max_size=4)
    )
    count = data.draw(st.integers(1, vocab))
    given_values = torch.tensor(rows, dtype=torch.float32)
    rows = given_values.tolist()
    values, tokens = likeliest(given_values, count)
    assert tokens.tolist() == [slow.ranking(row)[:count] for row in rows]
    assert values.tolist() == [[row[token] for token in slow.ranking(row)[:count]] for row in rows]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([1, 5, 60]), steps=st.sampled_from([0.0, 1.0]))
def test_every_field_is_what_sorting_says(data: st.DataObject, vocab: int, steps: float) -> None:
    counts = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    logits = logits_of(len(counts), vocab, seed=data.draw(st.integers(0, 99)), steps=steps)
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in counts]
    found = token_logprobs(torch.log_softmax(logits, dim=1), tokens, counts)
    for row, token, count, one in zip(logits.double().tolist(), tokens, counts, found, strict=True):
        expected = [log(chance) for chance in slow.softmax(row)]
        assert one.token_id == token
        assert one.logprob == pytest.approx(expected[token], abs=1e-5)
        assert one.rank == 1 + sum(value > row[token] for value in row)
        assert [other for other, _ in one.top] == slow.ranking(row)[:count]
        assert [value for _, value in one.top] == pytest.approx(
            [expected[other] for other, _ in one.top], abs=1e-5
        )


def test_slices_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(9, 30, steps=0.5)
    at_once = likeliest(logits, 7)
    monkeypatch.setattr(module, "SLICE_BYTES", 4 * 30 * 4)
    for one, other in zip(at_once, likeliest(logits, 7), strict=True):
        assert torch.equal(one, other)
