"""What a scheduler was asked since it was made, kept while an engine runs.

Owns ``OpenRequest``, the truth about a request whatever becomes of a scheduler, and ``Recorder``,
which makes a ``Record`` of everything when something broke. A step takes it four bytes. What is
kept has a bound: beyond it the first half is forgotten, and the record begins with the requests
that were on their way at the second. Writes no files.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import octavo
from octavo.cache.layout import CacheLayout
from octavo.sched.record import PLAIN, Begun, Failure, Record, RecordedRequest
from octavo.sched.request import Request, RequestState
from octavo.sched.scheduler import SchedulerOptions
from octavo.sched.step import StepPlan, StepResult

RECORD_BYTES = 32 << 20
"""Most bytes that an engine keeps of requests that have ended."""

MAX_TOKENS = 1 << 24
"""Tokens of a record, beyond which it is not written: waiting requests alone may have as many."""

_REQUEST_BYTES = 1024
"""What a request takes in a record beside its tokens, about."""


@dataclass(kw_only=True)
class OpenRequest:
    """A request that has not ended.

    requests: its continuations, by branch; those that fork later are not there yet. delivered: of
        every continuation that goes on, the tokens its client has got. scored: prompt tokens whose
        scores have been received.
    """

    requests: dict[int, Request]
    delivered: dict[int, int]
    scored: int = 0

    @property
    def request(self) -> Request:
        """The first continuation, which computes the prompt."""
        return self.requests[0]

    def unfinished(self) -> Iterator[Request]:
        """Continuations that go on, as far as there are any yet."""
        return (
            self.requests[branch] for branch in sorted(self.delivered) if branch in self.requests
        )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A request that has ended, in few bytes. tokens: int32, of the prompt and by branch."""

    shape: RecordedRequest
    prompt: np.ndarray
    outputs: dict[int, np.ndarray]
    eos: tuple[int, ...]
    salt: str

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.outputs.values()))


@dataclass(kw_only=True)
class _Segment:
    """A stretch of calls. first: number of the first request that was added in it. begun: those
    that were on their way when it began. size: bytes of the requests that ended in it.
    """

    first: int
    begun: dict[int, tuple[Begun, ...]]
    calls: bytearray = field(default_factory=bytearray)
    size: int = 0


class Recorder:
    """Told of every call before it is made. begun: requests that the scheduler was made with.
    limit: most bytes kept of requests that have ended.
    """

    def __init__(
        self,
        layout: CacheLayout,
        options: SchedulerOptions,
        *,
        begun: Iterable[OpenRequest] = (),
        limit: int = RECORD_BYTES,
    ) -> None:
        self._layout, self._options, self._limit = layout, options, limit
        self._open: dict[str, tuple[int, OpenRequest]] = {}
        self._kept: dict[int, _Kept] = {}
        self._next, self._missing = 0, 0
        for one in begun:
            self._open[one.request.request_id] = (self._next, one)
            self._next += 1
        self._segments = [_Segment(first=self._next, begun=self._stand())]
        self._receipt: tuple[StepPlan, StepResult] | None = None

    # -- calls -------------------------------------------------------------------------------------

    def add(self, opened: OpenRequest) -> None:
        """A request is added."""
        self._open[opened.request.request_id] = (self._next, opened)
        self._note(f"a{self._next}")
        self._next += 1

    def abort(self, request_id: str, branch: int) -> None:
        """A continuation is ended."""
        self._note(f"x{self._open[request_id][0]}.{branch}")

    def schedule(self) -> None:
        """A step is planned. No other is in flight."""
        segment = self._segments[-1]
        if segment.size + len(segment.calls) > self._limit // 2:
            self._segments.append(_Segment(first=self._next, begun=self._stand()))
            while len(self._segments) > 2:
                self._forget_first()
        self._note("s")

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """A receipt is given to the scheduler."""
        self._receipt = plan, result
        for name in sorted(result.invalid):
            root, _, branch = name.partition("#")
            self._note(f"n{self._open[root][0]}.{branch or 0}")
        self._note("f" if result.failed else "c")

    def committed(self) -> None:
        """The receipt was taken."""
        self._receipt = None

    def close(self, request_id: str) -> None:
        """A request has ended."""
        number, opened = self._open.pop(request_id)
        self._kept[number] = kept = _keep(number, opened)
        self._segments[-1].size += 4 * kept.num_tokens + _REQUEST_BYTES

    def _note(self, call: str) -> None:
        self._segments[-1].calls += f"{call} ".encode()

    # -- bounds ------------------------------------------------------------------------------------

    def _stand(self) -> dict[int, tuple[Begun, ...]]:
        return {number: tuple(_stand(opened)) for number, opened in self._open.values()}

    def _forget_first(self) -> None:
        gone, first = self._segments.pop(0), self._segments[0]
        self._missing += gone.calls.count(b" ")
        for number in [n for n in self._kept if n < first.first and n not in first.begun]:
            del self._kept[number]

    # -- the record --------------------------------------------------------------------------------

    def record(self, error: BaseException) -> Record | None:
        """Everything up to the call that raised ``error``. None where it is too much."""
        everything = dict(self._kept)
        for number, opened in self._open.values():
            everything[number] = _keep(number, opened)
        self._add_receipt(everything)
        requests = [everything[number] for number in sorted(everything)]
        if sum(one.num_tokens for one in requests) > MAX_TOKENS:
            return None
        return Record(
            octavo=octavo.__version__,
            layout=self._layout,
            options=self._options,
            requests=tuple(_anonymous(requests, self._segments[0].begun)),
            calls=b"".join(segment.calls for segment in self._segments).decode().rstrip(),
            complete=not self._missing,
            missing=self._missing,
            failure=Failure(type=type(error).__name__, where=tuple(_where(error))),
        )

    def _add_receipt(self, everything: dict[int, _Kept]) -> None:
        """Tokens of a receipt that broke the scheduler, whether or not a request has got its own
        yet.
        """
        if self._receipt is None:
            return
        plan, result = self._receipt
        places = dict(zip(plan.request_ids, plan.output_len.tolist(), strict=True))
        for name, token in result.tokens.items():
            root, _, branch = name.partition("#")
            if root in self._open:
                outputs = everything[self._open[root][0]].outputs
                had = outputs.get(int(branch or 0), np.zeros(0, np.int32))[: places.get(name, 0)]
                outputs[int(branch or 0)] = np.append(had, np.int32(token))


def _stand(opened: OpenRequest) -> Iterator[Begun]:
    for request in opened.unfinished():
        yield Begun(
            branch=request.branch,
            tokens=len(request.output_token_ids),
            scored=len(request.scored),
            admitted=request.state is not RequestState.WAITING or request.num_preemptions > 0,
        )


def _keep(number: int, opened: OpenRequest) -> _Kept:
    request = opened.request
    prompt, params = len(request.prompt_token_ids), request.params
    shape = RecordedRequest(
        number=number,
        prompt=(),
        outputs=(),
        params=tuple((name, getattr(params, name)) for name in PLAIN),
        stop_token_ids=tuple(params.stop_token_ids),
        penalized=params.penalized,
        eos_token_ids=(),
        priority=request.priority,
        salt=0,
        marks=request.marks,
        begun=(),
    )
    return _Kept(
        shape=shape,
        prompt=request.token_ids(0, prompt).copy(),
        outputs={
            branch: one.token_ids(prompt, one.num_tokens).copy()
            for branch, one in opened.requests.items()
        },
        eos=tuple(sorted(request.eos_token_ids)),
        salt=request.cache_salt,
    )


def _anonymous(
    requests: Sequence[_Kept], begun: dict[int, tuple[Begun, ...]]
) -> Iterator[RecordedRequest]:
    """Requests with pseudonyms for tokens and salts: numbers by first appearance."""
    ends = [token for one in requests for token in (*one.eos, *one.shape.stop_token_ids)]
    flat = [part for one in requests for part in (one.prompt, *one.outputs.values())]
    named = _pseudonyms(np.concatenate([*flat, np.array(ends, np.int32)]))
    salts: dict[str, int] = {"": 0}
    for one in requests:
        shape = one.shape
        yield RecordedRequest(
            **{
                **vars(shape),
                "prompt": tuple(named[one.prompt].tolist()),
                "outputs": tuple(
                    (branch, tuple(named[tokens].tolist()))
                    for branch, tokens in sorted(one.outputs.items())
                ),
                "stop_token_ids": tuple(named[token].item() for token in shape.stop_token_ids),
                "eos_token_ids": tuple(named[token].item() for token in one.eos),
                "salt": salts.setdefault(one.salt, len(salts)),
                "begun": begun.get(shape.number, ()),
            }
        )


def _pseudonyms(tokens: np.ndarray) -> np.ndarray:
    """By token id: how many other tokens appear before its first appearance. int32."""
    count, size = len(tokens), int(tokens.max(initial=0)) + 1
    first = np.full(size, count, np.int64)
    # Of several values for one place the last one stays.
    first[tokens[::-1]] = np.arange(count)[::-1]
    present = np.flatnonzero(first < count)
    named = np.full(size, -1, np.int32)
    named[present[np.argsort(first[present])]] = np.arange(len(present))
    return named


def _where(error: BaseException) -> Iterator[str]:
    """Where an error was raised. Files of other programs are named without their folders."""
    root = Path(octavo.__file__).parent.parent
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        shown = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
        yield f"{shown}:{frame.lineno} {frame.name}"
