"""Running requests by table row, as arrays: what a step of many single tokens asks of them.

Owns ``Lanes``. Everything in it follows from the requests, which stay what is true: their tokens
are counted here so that planning a step and taking its receipt are a handful of array operations,
however many requests there are. Knows no cache and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, eq=False)
class Crew:
    """Running requests in the order in which they are served, while nobody comes or goes.

    rows: int64 [R]. ids, sampling, branch (int32 [R]): of their requests. plain: nothing about
    their sampling depends on what came before.
    """

    rows: np.ndarray
    ids: tuple[str, ...]
    sampling: tuple[SamplingParams, ...]
    branch: np.ndarray
    plain: bool


class Lanes:
    """By table row, for ``rows`` rows.

    known: tokens of the request in the row. prompt: those of its prompt. last: its last token.
    stay: how often the row has changed hands; a receipt of an earlier stay is void.
    """

    def __init__(self, rows: int) -> None:
        self.known = np.zeros(rows, np.int64)
        self.prompt = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int32)
        self.stay = np.zeros(rows, np.int64)
        self._crew: Crew | None = None

    def enter(self, row: int, request: Request) -> None:
        """A request begins to run in a row."""
        known = request.num_tokens
        self.known[row], self.prompt[row] = known, len(request.prompt_token_ids)
        self.last[row] = request.token_ids(known - 1, known)[0]
        self._crew = None

    def leave(self, row: int) -> None:
        """The request in a row gives it up."""
        self.stay[row] += 1
        self.known[row] = 0
        self._crew = None

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Rows have got one more token each (int32)."""
        self.known[rows] += 1
        self.last[rows] = tokens

    def crew(self, running: Sequence[tuple[int, Request]]) -> Crew:
        """``running``, rows and requests in the order in which they are served, as arrays; made
        anew when somebody has come or gone.
        """
        if self._crew is None:
            requests = [request for _, request in running]
            self._crew = Crew(
                rows=np.array([row for row, _ in running], np.int64),
                ids=tuple(request.request_id for request in requests),
                sampling=tuple(request.params for request in requests),
                branch=np.array([request.branch for request in requests], np.int32),
                plain=all(request.plain for request in requests),
            )
        assert len(self._crew.rows) == len(running)
        return self._crew

    def check(self, running: Sequence[tuple[int, Request]]) -> None:
        """Assert that the arrays say what the requests do."""
        arrays = (self.known, self.prompt, self.last, self.stay)
        assert len({len(array) for array in arrays}) == 1
        assert np.count_nonzero(self.known) == len(running)
        for row, request in running:
            assert self.known[row] == request.num_tokens
            assert self.prompt[row] == len(request.prompt_token_ids)
            assert self.last[row] == request.token_ids(request.num_tokens - 1, request.num_tokens)
        if self._crew is not None:
            assert self._crew.ids == tuple(request.request_id for _, request in running)
            assert self._crew.rows.tolist() == [row for row, _ in running]
