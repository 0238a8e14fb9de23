"""What crosses from the scheduler to the runner, and back.

Owns ``StepPlan`` and ``StepResult``. A plan is complete: a runner needs nothing else to read, compute and write, and a plan
never changes after it was made, with one exception that is its purpose: ``GroupStep.table`` of an unbounded group is the live
table, so that a step of many long requests copies no long rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.cache.group_step import CopyJob, GroupStep
from octavo.sched.sampling import SamplingParams

__all__ = ["CopyJob", "GroupStep", "StepPlan", "StepResult"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Request i computes tokens ``[start[i], stop[i])``, laid out one request after another.

    token_ids: int32 [T]. query_start: int32 [R + 1]; request i's tokens are ``token_ids[query_start[i]:query_start[i + 1]]``.
    samples: bool [R]; True where the last token of the request's part yields a new token.
    output_len: int32 [R]; tokens the request has generated so far, which place its next draw in its own random sequence.
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
    groups: tuple[GroupStep, ...]
    copies: tuple[CopyJob, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all requests."""
        return int(self.query_start[-1])


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The receipt of one step: what was sampled, by request id. ``failed`` says the step's writes cannot be trusted."""

    step: int
    tokens: dict[str, int]
    failed: bool = False
