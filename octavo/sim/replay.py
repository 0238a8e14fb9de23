"""A recorded scheduler, asked the same again.

Owns ``read`` (a dump's file) and ``replay``: a new scheduler with the recorded options, the
recorded calls in their order, and receipts in which every continuation gets the tokens that it got.
Computes nothing and needs no arena, however large the recorded one was.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.base import ConfigError
from octavo.sched.record import Record, RecordedRequest, continuation
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay. calls: made, the failing one included. error: what was raised, None
    where nothing was.
    """

    calls: int
    error: Exception | None


def read(path: Path) -> Record:
    """A dump. Raises ConfigError for a file that cannot be read or is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"replay {path} cannot be read: {error}") from error
    try:
        data = json.loads(gzip.decompress(content))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"replay {path} is no dump of octavo, or not whole: {error}") from error
    try:
        return Record.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"replay {path}: {error}") from error


def replay(record: Record, *, check: bool = False) -> Replayed:
    """Make the recorded calls until one raises. check: assert all invariants after every call, to
    find where it began.
    """
    again, calls = _Replay(record), record.calls.split()
    for number, call in enumerate(calls, 1):
        try:
            again.make(call)
            if check:
                again.scheduler.check()
        except Exception as error:
            return Replayed(calls=number, error=error)
    return Replayed(calls=len(calls), error=None)


class _Replay:
    """A scheduler and what its requests get."""

    def __init__(self, record: Record) -> None:
        self.scheduler = Scheduler(record.layout, record.options)
        self._requests = {one.number: one for one in record.requests}
        self._tokens = {
            continuation(one.number, branch): tokens
            for one in record.requests
            for branch, tokens in one.outputs
        }
        # Where more is sampled than was, in a record that is cut or by an octavo that was mended: a
        # token that ends no text.
        ends = {0}.union(*((*one.eos_token_ids, *one.stop_token_ids) for one in record.requests))
        self._other = 1 + max(ends)
        self._invalid: set[str] = set()
        self._in_flight: deque[StepPlan] = deque()
        self.scheduler.restore([made for one in record.requests for made in self._begun(one)])

    def _begun(self, one: RecordedRequest) -> Iterator[Request]:
        base = one.request()
        for begun in one.begun:
            request = base if begun.branch == 0 else base.fork(begun.branch)
            for place in range(begun.tokens):
                request.append(self._token(request.request_id, place))
            if request.params.logprobs is not None:
                request.logprobs += [_score(0)] * begun.tokens
            request.scored += [_score(0)] * begun.scored
            request.num_preemptions = int(begun.admitted)
            yield request

    def make(self, call: str) -> None:
        """One call. A receipt for which no step is in flight, as after a cut, is passed over."""
        kind, (number, _, branch) = call[0], call[1:].partition(".")
        match kind:
            case "a":
                self.scheduler.add(self._requests[int(number)].request())
            case "x":
                self.scheduler.abort(continuation(int(number), int(branch)))
            case "n":
                self._invalid.add(continuation(int(number), int(branch)))
            case "s":
                if (plan := self.scheduler.schedule()) is not None:
                    self._in_flight.append(plan)
            case "c" | "f":
                if self._in_flight:
                    self.scheduler.commit(self._receipt(self._in_flight.popleft(), kind == "f"))
            case _:
                raise ConfigError(f"the record is damaged: there is no call {call!r}")

    def _receipt(self, plan: StepPlan, failed: bool) -> StepResult:
        if failed:
            return StepResult(step=plan.step, tokens={}, failed=True)
        invalid, self._invalid = frozenset(self._invalid), set()
        tokens: dict[str, int] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        for i in np.flatnonzero(plan.samples).tolist():
            if plan.request_ids[i] in invalid:
                continue
            for name in (plan.request_ids[i], *plan.forks.get(i, ())):
                tokens[name] = self._token(name, int(plan.output_len[i]))
                logprobs[name] = _score(tokens[name])
        scored = {
            plan.request_ids[i]: [_score(token) for token in given.tolist()]
            for i, given in plan.scored.items()
        }
        return StepResult(
            step=plan.step, tokens=tokens, logprobs=logprobs, scored=scored, invalid=invalid
        )

    def _token(self, name: str, place: int) -> int:
        tokens = self._tokens.get(name, ())
        return tokens[place] if place < len(tokens) else self._other


def _score(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token, logprob=0.0, rank=1, top=())
