"""One request from arrival to its last token.

Owns its tokens, its state and why it ended. Knows no pages, no clock and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from octavo.base import ConfigError
from octavo.cache.hashing import NO_KEYS
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import TokenLogprobs
from octavo.sched.structured import Constraint

NO_LIMIT = 1 << 62
"""Stands where a request may have any number of tokens."""


class RequestState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API; ``error`` is ours: something went wrong
    with it.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def branch_id(request_id: str, branch: int) -> str:
    """Id of one continuation of a request."""
    return f"{request_id}#{branch}" if branch else request_id


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt being continued.

    eos_token_ids: ids that end it unless ``params.ignore_eos``.
    cache_salt: requests with different salts never share cached bytes.
    marks: positions in the prompt worth a resume point, known to the application.
    branch: which of ``params.n`` continuations it is. Branch 0 computes the prompt; the others fork
        from it.
    constraint: what limits its tokens, made of ``params.structured_outputs``.
    ends: tokens that end its text. least_tokens, most_tokens: with no more than so many tokens it
        does not end by one of those; with so many it ends in any case.
    plain: nothing about its sampling depends on what came before.
    logprobs: of every output token, where asked for. scored: of the prompt tokens from the second
        on, likewise.
    num_cached_tokens: tokens the prefix cache spared at first admission. num_preemptions: times it
        lost its pages.
    unit_keys: names of its whole hash units, filled in by the cache. cache_report: what it held
        when it ended.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    marks: tuple[int, ...] = ()
    branch: int = 0
    constraint: Constraint | None = None
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scored: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    unit_keys: np.ndarray = field(default_factory=NO_KEYS.copy)
    cache_report: Any = None

    def __post_init__(self) -> None:
        if len(self.prompt_token_ids) == 0:
            raise ConfigError(
                f"request {self.request_id}: the prompt is empty; give at least one token"
            )
        self._tokens = np.array(self.prompt_token_ids, np.int32)
        params, self._prompt_len = self.params, len(self.prompt_token_ids)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        self.ends = eos.union(params.stop_token_ids)
        self.least_tokens = self._prompt_len + params.min_tokens
        most = NO_LIMIT if params.max_tokens is None else params.max_tokens
        self.most_tokens = self._prompt_len + most
        self.plain = not (
            params.n > 1
            or params.penalized
            or params.min_tokens
            or params.prompt_logprobs is not None
            or self.constraint is not None
        )

    def fork(self, branch: int) -> Request:
        """Another continuation of the same prompt."""
        assert branch and not self.branch and not self.output_token_ids
        return Request(
            request_id=branch_id(self.request_id, branch),
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            eos_token_ids=self.eos_token_ids,
            priority=self.priority,
            cache_salt=self.cache_salt,
            branch=branch,
            constraint=None if self.constraint is None else self.constraint.fork(),
        )

    @property
    def to_score(self) -> int:
        """Prompt tokens whose logprobs are wanted and not there yet."""
        if self.params.prompt_logprobs is None or self.branch:
            return 0
        return len(self.prompt_token_ids) - 1 - len(self.scored)

    @property
    def barred(self) -> tuple[int, ...]:
        """Tokens that would end the text before ``min_tokens``."""
        if len(self.output_token_ids) >= self.params.min_tokens:
            return ()
        return (
            *self.params.stop_token_ids,
            *(() if self.params.ignore_eos else sorted(self.eos_token_ids)),
        )

    def append(self, token: int) -> None:
        """Add a generated token."""
        known = self._prompt_len + len(self.output_token_ids)
        if known == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(max(64, known), np.int32)])
        self._tokens[known] = token
        self.output_token_ids.append(token)

    def rewind(self, tokens: int, scored: int) -> None:
        """Wait again with the first ``tokens`` generated tokens and ``scored`` scores, whatever a
        broken scheduler has done with the rest. A request that was admitted stays one that was:
        what its first admission found is not asked again.
        """
        assert tokens <= len(self.output_token_ids) and scored <= len(self.scored)
        if self.state is not RequestState.WAITING:
            self.num_preemptions += 1
        self.state, self.finish_reason = RequestState.WAITING, None
        del self.output_token_ids[tokens:], self.logprobs[tokens:], self.scored[scored:]
        self.unit_keys, self.cache_report = NO_KEYS.copy(), None

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)`` of prompt and output, int32."""
        assert 0 <= start <= stop <= self.num_tokens
        return self._tokens[start:stop]

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self._prompt_len + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        """True once it has a finish reason."""
        return self.state is RequestState.FINISHED
