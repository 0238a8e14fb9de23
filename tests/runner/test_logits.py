"""What changes logits: bias, penalties and barred tokens against the slow sampler and Transformers,
and that nothing breaks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from octavo.runner import logits as module
from octavo.runner.logits import adjust
from octavo.sched.sampling import SamplingParams
from tests.runner import slow
from tests.runner.slow import logits_of

NONE = np.zeros(0, np.int32)
INF = float("inf")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@st.composite
def asked(draw: st.DrawFn, vocab: int) -> tuple[SamplingParams, list[int], list[int], list[int]]:
    """(params, prompt, output, barred) of one row, each option off about half of the time."""
    token = st.integers(0, vocab - 1)
    params = SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 40.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.1])),
        logit_bias=draw(
            st.one_of(
                st.just({}), st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4)
            )
        ),
    )
    tokens = st.lists(token, max_size=12)
    return (
        params,
        draw(tokens),
        draw(tokens),
        draw(st.one_of(st.just([]), st.lists(token, max_size=vocab + 1))),
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([1, 3, 20]))
def test_every_row_is_what_the_slow_sampler_makes_of_it(data: st.DataObject, vocab: int) -> None:
    rows = data.draw(st.lists(asked(vocab), min_size=1, max_size=6))
    logits = logits_of(len(rows), vocab, seed=data.draw(st.integers(0, 99)))
    expected = [slow.adjusted(logits[i].double().tolist(), *row) for i, row in enumerate(rows)]
    adjust(
        logits,
        [params for params, *_ in rows],
        history={
            i: (ids(*prompt), ids(*output))
            for i, (params, prompt, output, _) in enumerate(rows)
            if params.penalized
        },
        barred={i: barred for i, (*_, barred) in enumerate(rows)},
    )
    torch.testing.assert_close(
        logits.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("penalty", [0.6, 1.2])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    logits, tokens = logits_of(1, 50), [3, 3, 9, 41, 0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    adjust(
        logits,
        [SamplingParams(repetition_penalty=penalty)],
        history={0: (ids(*tokens[:2]), ids(*tokens[2:]))},
        barred={},
    )
    torch.testing.assert_close(logits, expected)


def test_rows_that_want_nothing_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(3, 10)
    before = logits.clone()
    params = [
        SamplingParams(),
        SamplingParams(temperature=0, top_k=4, logprobs=3),
        SamplingParams(min_p=0.5),
    ]
    adjust(logits, params, history={}, barred={1: ()})
    assert torch.equal(logits, before)
    biased = [params[0], SamplingParams(logit_bias={2: 1.0}), params[2]]
    adjust(logits, biased, history={}, barred={})
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for name in ("_places", "_penalize"):
        monkeypatch.delattr(module, name)
    adjust(logits, params, history={}, barred={})


def test_slices_of_many_penalized_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(frequency_penalty=0.1 * i) for i in range(7)]
    history = {i: (NONE, np.arange(i + 3, dtype=np.int32) % 4) for i in range(7)}
    at_once, sliced = logits_of(7, 10), logits_of(7, 10)
    adjust(at_once, params, history=history, barred={})
    monkeypatch.setattr(module, "SLICE_BYTES", 4 * 10 * 2)
    adjust(sliced, params, history=history, barred={})
    assert torch.equal(at_once, sliced)


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e30, 1e300])
@pytest.mark.parametrize(
    "row", [[0.0, -0.0, 1.0, -1.0], [INF, 1e38, -1e38, -INF], [3e38, 3e38, 3e38, 3e38]]
)
def test_extreme_penalties_leave_numbers(penalty: float, row: Sequence[float]) -> None:
    logits = torch.tensor([[*row, 5.0]])
    infinite = logits.isinf()
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=2, frequency_penalty=2)
    adjust(logits, [params], history={0: (ids(0, 1, 2, 3), ids(*range(4)))}, barred={})
    assert not logits.isnan().any()
    assert torch.equal(logits.isinf(), infinite)


def test_a_bias_cannot_bring_a_barred_token_back() -> None:
    logits = logits_of(1, 6)
    adjust(
        logits,
        [SamplingParams(logit_bias=dict.fromkeys(range(6), 100.0))],
        history={},
        barred={0: (1, 1, 4)},
    )
    assert logits[0].isinf().tolist() == [False, True, False, False, True, False]


def test_all_barred_but_one() -> None:
    logits = logits_of(2, 6)
    adjust(logits, [SamplingParams(), SamplingParams()], history={}, barred={1: (0, 1, 2, 4, 5)})
    assert logits[1].isfinite().tolist() == [False, False, False, True, False, False]
    assert logits[0].isfinite().all()


def test_a_row_with_every_possible_token_barred_is_not_barred() -> None:
    logits = logits_of(3, 4)
    logits[1, 2] = -INF
    before = logits.clone()
    adjust(
        logits,
        [SamplingParams()] * 3,
        history={},
        barred={0: (0, 1, 2, 3), 1: (0, 1, 3), 2: (0, 1, 2)},
    )
    assert torch.equal(logits[:2], before[:2])
    assert logits[2].isinf().tolist() == [True, True, True, False]


def test_ids_that_name_no_token_change_nothing() -> None:
    logits = logits_of(1, 4)
    before = logits.clone()
    adjust(
        logits,
        [SamplingParams(logit_bias={4: 9.0, -1: 9.0})],
        history={},
        barred={0: (-1, 4, 10**6)},
    )
    assert torch.equal(logits, before)
