"""Which tokens a grammar lets come next, as bits over the vocabulary, and what that does to logits.

Owns ``Vocabulary``, ``Matcher`` (the ``Constraint`` of one continuation) and ``Masks``, which
computes a step's masks in a thread beside the model. Parsing is llguidance's. Knows no schemas and
no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from octavo.base import ConfigError, ceil_div

WORD = 32
"""Bits in a word of a mask."""

THREADS = 4
"""Most threads that look at different rows of a step."""

Constrained = Mapping[int, tuple[Any, np.ndarray]]
"""``StepPlan.constrained``."""


class Vocabulary:
    """The bytes of a model's tokens, as grammars want them; made once, which takes seconds for
    large vocabularies.

    tokens: one for every logit; empty for those that stand for nothing and are never let through.
    special: tokens that are no text: a grammar can only name them. ends: tokens that end an output;
        at least one. encode: bytes to tokens.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special: Iterable[int],
        ends: Iterable[int],
        encode: Callable[[bytes], list[int]],
    ) -> None:
        self.ends = sorted(ends)
        assert self.ends, "an output that nothing ends cannot be constrained"
        self.size, self.words = len(tokens), ceil_div(len(tokens), WORD)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Spelling(list(tokens), sorted({*special, *self.ends}), encode)),
            eos_token=self.ends,
        )
        assert self.tokenizer.vocab_size == self.size


class _Spelling:
    """What llguidance asks of a tokenizer."""

    def __init__(
        self, tokens: list[bytes], special: list[int], encode: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self._encode = tokens, special, encode
        self.eos_token_id, self.bos_token_id = special[0], None

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


class Matcher:
    """Where one output stands in a grammar. Raises ConfigError where the grammar cannot be
    compiled.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str | LLMatcher) -> None:
        if isinstance(grammar, str):
            grammar = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
            if grammar.is_error():
                raise ConfigError(grammar.get_error())
        self.vocabulary, self._first = vocabulary, grammar
        # Derived: the state after the tokens seen.
        self._state, self._seen = grammar.deep_copy(), np.empty(0, np.int32)

    def fork(self) -> Matcher:
        """The same grammar, from its beginning."""
        return Matcher(self.vocabulary, self._first)

    def follow(self, tokens: np.ndarray) -> LLMatcher | None:
        """llguidance's state after ``tokens``; None where the grammar cannot go on from there.

        Tokens in common with what was asked last are not looked at again, others are taken back.
        """
        both = min(len(tokens), len(self._seen))
        equal = tokens[:both] == self._seen[:both]
        common = both if equal.all() else int(equal.argmin())
        behind = len(self._seen) - common
        if self._state.is_error() or (behind and not self._state.rollback(behind)):
            # A state never leaves an error, which may lie behind what is asked now.
            self._state, common = self._first.deep_copy(), 0
        self._seen = np.array(tokens, np.int32)
        self._state.consume_tokens(tokens[common:].tolist())
        return None if self._state.is_error() else self._state

    def accepts(self, tokens: np.ndarray) -> bool:
        """Whether an output may end after ``tokens``."""
        state = self.follow(tokens)
        return state is not None and state.is_accepting()


class Masks:
    """Computes masks in a thread of its own, while the model runs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-masks")
        self._executor = LLExecutor(THREADS)

    def start(self, constrained: Constrained) -> Future[Tensor]:
        """``forbidden`` of all constraints, in order, when it is ready."""
        return self._thread.submit(self.forbidden, list(constrained.values()))

    def forbidden(self, wanted: Sequence[tuple[Matcher, np.ndarray]]) -> Tensor:
        """Tokens that must not follow the outputs: bool [len(wanted), vocab].

        A row where no token may come, not even an end, is all True.
        """
        vocabulary = wanted[0][0].vocabulary
        bits = np.zeros((len(wanted), vocabulary.words), np.int32)
        states = [
            (state, row)
            for row, (matcher, tokens) in enumerate(wanted)
            if (state := matcher.follow(tokens)) is not None
        ]
        if states:
            self._executor.unsafe_compute_mask_ptr(
                states, bits.ctypes.data, bits.strides[0], len(wanted)
            )
        for state, row in states:
            if state.is_error():
                bits[row] = 0
        unpacked = np.unpackbits((~bits).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(unpacked[:, : vocabulary.size].view(np.bool_))


def forbid(logits: Tensor, rows: Sequence[int], forbidden: Tensor) -> None:
    """Make tokens impossible in rows of logits float32 [B, vocab], in place. forbidden: bool
    [len(rows), vocab], on the CPU.
    """
    if logits.is_cpu:
        # Row by row and in this thread: waking others for a millisecond's work costs more.
        for row, never in zip(rows, forbidden, strict=True):
            np.copyto(logits[row].numpy(), -np.inf, where=never.numpy())
    else:
        forbid_on_device(logits, rows, forbidden)


def forbid_on_device(logits: Tensor, rows: Sequence[int], forbidden: Tensor) -> None:
    """``forbid`` in a few operations over all rows."""
    index = torch.tensor(rows, device=logits.device)
    part = logits.index_select(0, index)
    logits.index_copy_(0, index, part.masked_fill_(forbidden.to(part.device), float("-inf")))
