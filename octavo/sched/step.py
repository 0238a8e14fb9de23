"""What crosses from the scheduler to the runner, and back.

Owns ``StepPlan`` and ``StepResult``. A plan is complete: a runner needs nothing else to read, compute and write, and a plan
never changes after it was made, with one exception that is its purpose: ``GroupStep.table`` of an unbounded group is the live
table, so that a step of many long requests copies no long rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.sched.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class CopyJob:
    """Copy ``units`` arena units from page ``source`` to page ``target``. Jobs run before the step, in order."""

    source: int
    target: int
    units: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupStep:
    """Where one group's layers read and write in one step. R requests, T tokens in all.

    Block b of request i lies at arena unit ``table[rows[i], column(b)]`` with ``column(b) = b`` for ``b < fixed`` and
    ``fixed + (b - fixed) % turning`` behind (``fixed`` is None where every block has its own column).

    fresh: bool [R]. False: write first, then read pages only: tokens ``[.., stop)`` are in pages. True: read pages for tokens
        before ``start`` and attend over them and the step's own fresh entries, then write; a page may be read as one block and
        written as another, so every layer reads all its past before it writes.
    write_page, write_row: int32 [T]. Page (unit offset) and row in its block for every token's entry; page -1 where the
        entry is not stored (it will not be needed, or a shared page holds it already). For streams with a stride the entry
        closed by a token goes to row // stride.
    """

    table: np.ndarray
    rows: np.ndarray
    fixed: int | None
    turning: int
    block_tokens: int
    fresh: np.ndarray
    write_page: np.ndarray
    write_row: np.ndarray

    def column(self, block: int) -> int:
        """Table column of a block."""
        if self.fixed is None or block < self.fixed:
            return block
        return self.fixed + (block - self.fixed) % self.turning


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
