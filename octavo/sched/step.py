"""What crosses from the scheduler to the runner, and back.

Owns ``StepPlan`` and ``StepResult``. A plan is complete: a runner needs nothing else to read,
compute and write, and a plan never changes after it was made, with one exception that is its
purpose: ``GroupStep.table`` of an unbounded group is the live table, so that a step of many long
    requests copies no long rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.cache.group_step import CopyJob, GroupStep
from octavo.sched.sampling import SamplingParams
from octavo.sched.structured import Constraint

__all__ = ["CopyJob", "GroupStep", "StepPlan", "StepResult", "TokenLogprobs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Request i computes tokens ``[start[i], stop[i])``, laid out one request after
    another.

    token_ids: int32 [T]. query_start: int32 [R + 1]; request i's tokens are
        ``token_ids[query_start[i]:query_start[i + 1]]``.
    samples: bool [R]; True where the last token of the request's part yields a new token.
    output_len: int32 [R]; tokens the request has generated so far, which place its next draw in its
        own random sequence.
    branch: int32 [R]; which continuation of its prompt the request is.

    By request index, for the few that want them:
    forks: ids of further continuations (branches 1, 2, ...) that sample from the same logits.
    history: (prompt, output) tokens, int32, of requests whose ``params.penalized``; they sample in
        this step.
    barred: tokens that must not be sampled now (what would end the text before min_tokens).
    scored: the tokens, int32, that follow the first positions of the part and whose logprobs are
        wanted.
    constrained: (constraint, output tokens so far, int32) of requests whose next token, and whose
        forks' first, a grammar limits; they sample in this step.
    """

    step: int
    request_ids: tuple[str, ...]
    token_ids: np.ndarray
    query_start: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    samples: np.ndarray
    sampling: tuple[SamplingParams, ...]
    output_len: np.ndarray
    branch: np.ndarray
    groups: tuple[GroupStep, ...]
    copies: tuple[CopyJob, ...] = field(default=())
    forks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    history: Mapping[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    barred: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    scored: Mapping[int, np.ndarray] = field(default_factory=dict)
    constrained: Mapping[int, tuple[Constraint, np.ndarray]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all requests."""
        return int(self.query_start[-1])


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was, by the model's own logits (no temperature, penalty or bias).

    rank: 1 for the likeliest. top: the likeliest tokens and their logprobs, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The receipt of one step: what was sampled, by request id. ``failed`` says the step's writes
    cannot be trusted.

    logprobs: of sampled tokens, where ``params.logprobs`` asks. scored: one for every token of
        ``StepPlan.scored``. invalid: ids of requests for which the model computed numbers that are
        none (NaN, infinity): nothing was sampled for them, and nothing of theirs is to be kept.
    """

    step: int
    tokens: Mapping[str, int]
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    scored: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    invalid: frozenset[str] = frozenset()
    failed: bool = False
