"""Masks of grammars: against an independent matcher of expressions, whatever was asked before, and
in their place among the other changes of logits.
"""

from __future__ import annotations

import numpy as np
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from octavo.base import ConfigError
from octavo.runner.logits import adjust
from octavo.runner.masks import Masks, Matcher, Vocabulary, forbid, forbid_on_device
from octavo.runner.sampler import Choice, sample
from octavo.sched.sampling import SamplingParams

WORDS = [*(bytes([byte]) for byte in range(32, 127)), b"ab", b"abc", b"12", b"10.", b", ", b""]
END, OTHER_END, MARK = len(WORDS), len(WORDS) + 1, len(WORDS) + 2
TOKENS = [*WORDS, b"<end>", b"<stop>", b"<mark>"]
VOCABULARY = Vocabulary(
    TOKENS, special=[MARK], ends=[END, OTHER_END], encode=lambda text: [byte - 32 for byte in text]
)
MASKS = Masks()
EXPRESSIONS = (
    r"[a-c]{1,4}",
    r"(ab|abc)(12|1)*",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
    r"[a-z]+(, [a-z]+)*",
    r"a(b(c|, )?)?1{0,3}",
)


def matcher(expression: str) -> Matcher:
    return Matcher(VOCABULARY, LLMatcher.grammar_from_regex(expression))


def allowed(one: Matcher, tokens: list[int]) -> list[int]:
    (row,) = MASKS.forbidden([(one, np.array(tokens, np.int32))])
    return (~row).nonzero()[:, 0].tolist()


def expected(expression: str, tokens: list[int]) -> list[int]:
    """What another library says may come next: text that can still become a whole match."""
    text = b"".join(TOKENS[token] for token in tokens).decode()
    going_on = [
        token
        for token, word in enumerate(WORDS)
        if word and regex.fullmatch(expression, text + word.decode(), partial=True)
    ]
    whole = regex.fullmatch(expression, text) is not None
    return going_on + ([END, OTHER_END] if whole else [])


@settings(max_examples=60, deadline=None)
@given(expression=st.sampled_from(EXPRESSIONS), choices=st.lists(st.integers(0, 10**6), max_size=8))
def test_masks_are_those_of_another_matcher(expression: str, choices: list[int]) -> None:
    one, tokens = matcher(expression), []
    for choice in choices:
        may = allowed(one, tokens)
        assert may == expected(expression, tokens)
        assert one.accepts(np.array(tokens, np.int32)) == (END in may)
        going_on = [token for token in may if token < END]
        if not going_on:
            break
        tokens.append(going_on[choice % len(going_on)])


@settings(max_examples=60, deadline=None)
@given(expression=st.sampled_from(EXPRESSIONS), data=st.data())
def test_a_mask_is_a_function_of_the_output(expression: str, data: st.DataObject) -> None:
    """Whatever was asked before: longer outputs, others, and such that the grammar refuses."""
    tokens = st.lists(st.sampled_from([*range(65, 70), 17, 18, 13, 12, END, MARK]), max_size=6)
    used = matcher(expression)
    for asked in data.draw(st.lists(tokens, max_size=6)):
        assert allowed(used, asked) == allowed(matcher(expression), asked)
        assert allowed(used.fork(), asked) == allowed(matcher(expression), asked)


def test_drafts_are_taken_back() -> None:
    """Outputs with drafts behind them, then with some of the drafts: each as if asked alone."""
    expression = r"[a-c]{1,9}(12|10\.)"
    one, text = matcher(expression), [65, 66, 67, 65, 66, 17, 18]
    for kept, drafted in ((1, 4), (2, 6), (5, 7), (6, 7)):
        for length in (*range(kept, drafted + 1), kept):
            assert allowed(one, text[:length]) == allowed(
                matcher(r"[a-c]{1,9}(12|10\.)"), text[:length]
            )


def test_forks_go_their_own_ways() -> None:
    one = matcher(r"[a-c]{1,4}")
    other = one.fork()
    assert allowed(one, [65, 66]) != allowed(other, [])
    assert allowed(other, []) == allowed(matcher(r"[a-c]{1,4}"), [])


def test_rows_of_a_batch_are_those_of_each_alone() -> None:
    asked = [(matcher(expression), np.array([], np.int32)) for expression in EXPRESSIONS * 3]
    together = MASKS.start(dict(enumerate(asked))).result()
    assert together.shape == (len(asked), len(TOKENS))
    for (one, tokens), row in zip(asked, together, strict=True):
        assert torch.equal(row, MASKS.forbidden([(one.fork(), tokens)])[0])


def test_special_tokens_come_only_where_a_grammar_names_them() -> None:
    lark = LLMatcher.grammar_from_lark(f'start: /(.|\\n)*/ <[{MARK}]> "a"')
    one = Matcher(VOCABULARY, lark)
    assert MARK in allowed(one, [65]) and END not in allowed(one, [65])
    assert allowed(one, [65, MARK]) == [65]
    assert MARK not in allowed(matcher(r"(.|\n)*"), [65])


def test_where_nothing_fits_nothing_is_allowed() -> None:
    assert allowed(matcher("[a-c]+"), [90]) == []


def test_a_grammar_that_is_none() -> None:
    with pytest.raises(ConfigError, match="unknown name"):
        Matcher(VOCABULARY, LLMatcher.grammar_from_lark("start: missing"))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 5.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.5]),
        min_p=st.sampled_from([0.0, 0.3]),
        presence_penalty=st.sampled_from([0.0, -2.0]),
        repetition_penalty=st.sampled_from([1.0, 0.5]),
        logit_bias=st.sampled_from([{}, {3: 100.0}, {97: -100.0, 4: 100.0}]),
        seed=st.integers(0, 99),
    ),
)
def test_nothing_brings_back_what_is_forbidden(seed: int, params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 101, generator=generator) * 4
    forbidden = torch.rand(2, 101, generator=generator) < 0.9
    forbidden[:, 97] = False
    before, there = logits.clone(), logits.clone()
    forbid(logits, [2, 0], forbidden)
    forbid_on_device(there, [2, 0], forbidden)
    assert torch.equal(logits[1], before[1]) and torch.equal(logits, there)
    assert torch.equal(logits[[2, 0]], before[[2, 0]].masked_fill(forbidden, -torch.inf))
    history = (np.arange(5, dtype=np.int32), np.array([3, 97], np.int32))
    adjust(
        logits,
        [params] * 3,
        history=dict.fromkeys(range(3), history) if params.penalized else {},
        barred={0: (97,)},
    )
    choices = [Choice(row=row, request_id=str(row), params=params, place=0) for row in range(3)]
    chosen = sample(logits, choices, seed=1)
    assert not forbidden[0][chosen[2]] and not forbidden[1][chosen[0]]
    only = forbidden[1].logical_not().sum() == 1
    assert only or chosen[0] != 97, "what is barred stays out where anything else may come"


@pytest.mark.parametrize("size", [31, 32, 33, 64, 65])
def test_mask_words_cover_the_vocabulary(size: int) -> None:
    tokens = [b"a"] * (size - 1) + [b"<end>"]
    small = Vocabulary(tokens, special=[], ends=[size - 1], encode=lambda _: [0])
    one = Matcher(small, LLMatcher.grammar_from_regex("a*"))
    assert MASKS.forbidden([(one, np.zeros(0, np.int32))]).tolist() == [[False] * size]
