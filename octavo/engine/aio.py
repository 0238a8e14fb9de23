"""The asynchronous API: many clients, one engine that steps in a thread of its own.

Owns ``AsyncLLM``: the thread, the commands to it, and what arrives for every request. The thread
alone touches scheduler and runner; the event loop alone touches clients. Between them go commands,
carried out between two steps, and deltas, one call of the event loop per step. So a long step
delays tokens, never the event loop. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Self, TypedDict, TypeVar, Unpack

from octavo import arguments
from octavo.base import ConfigError, OctavoError
from octavo.engine import insight
from octavo.engine.core import TokenEvent
from octavo.engine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidNumbersError,
    QueueFullError,
    RequestFailedError,
    StepFailedError,
)
from octavo.engine.insight import EngineCounters, Tally
from octavo.engine.live import Live, Prompt
from octavo.engine.llm import LLM
from octavo.engine.outputs import CompletionDelta, RequestDelta, RequestOutput
from octavo.engine.text import Tokenizer
from octavo.sched.sampling import SamplingParams

__all__ = [
    "AsyncLLM",
    "EngineClosedError",
    "EngineDeadError",
    "InvalidNumbersError",
    "QueueFullError",
    "RequestFailedError",
    "StepFailedError",
]

T = TypeVar("T")
log = logging.getLogger(__name__)


class RequestOptions(TypedDict, total=False):
    """What a request may bring beside prompt and params.

    request_id: unique among those that run. priority: higher goes first. cache_salt: requests with
        different salts share
    nothing. marks: positions in the prompt where others will want to go on. number: which of
    several prompts of one call it is, for those that the engine's seed makes repeatable. shown:
    special tokens that are part of the text.
    """

    request_id: str
    priority: int
    cache_salt: str
    marks: Sequence[int]
    number: int
    shown: frozenset[int]


class Recorder(Protocol):
    """Told how requests fare, on the event loop's thread. All times in seconds."""

    def first_token(self, seconds: float) -> None:
        """Time from arrival to the first token."""

    def inter_token(self, seconds: float) -> None:
        """Time between two tokens of one continuation."""

    def finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        generated_tokens: int,
        seconds: float,
    ) -> None:
        """A request ended after ``seconds``: ``stop``, ``length``, ``abort`` or ``error``."""


class _Session:
    """One request as its client sees it: what arrives, and the times that a recorder wants to know.

    through: called when the last thing has arrived. entered: the scheduler has taken it.
    """

    def __init__(
        self, live: Live, recorder: Recorder | None, began: float, through: Callable[[], object]
    ) -> None:
        self.live, self.loop, self._through = live, asyncio.get_running_loop(), through
        self.items: asyncio.Queue[tuple[float, RequestDelta | OctavoError]] = asyncio.Queue()
        self.reason, self.entered = "abort", False
        self._recorder, self._began = recorder, began
        self._last: dict[int, float] = {}
        self._tokens = 0

    def take(self, when: float, item: RequestDelta | OctavoError) -> None:
        """Something arrives."""
        self.items.put_nowait((when, item))
        if isinstance(item, OctavoError) or item.finished:
            self._through()

    async def next(self) -> RequestDelta:
        """The next delta; raises what ended the request instead."""
        when, item = await self.items.get()
        if isinstance(item, OctavoError):
            self.reason = "error"
            raise item
        for output in item.outputs:
            self._note(output, when)
        return item

    def _note(self, output: CompletionDelta, when: float) -> None:
        if self._recorder is not None and not self._last:
            self._recorder.first_token(when - self._began)
        if self._recorder is not None and output.index in self._last:
            self._recorder.inter_token(when - self._last[output.index])
        self._last[output.index] = when
        self._tokens += len(output.token_ids)
        self.reason = output.finish_reason or self.reason

    def end(self, now: float) -> float:
        """The request has ended; returns the seconds it took."""
        if self._recorder is not None:
            self._recorder.finished(
                self.reason,
                prompt_tokens=len(self.live.request.prompt_token_ids),
                cached_tokens=self.live.request.num_cached_tokens,
                generated_tokens=self._tokens,
                seconds=now - self._began,
            )
        return now - self._began


class AsyncLLM:
    """An ``LLM`` for many clients at once.

    llm: belongs to this object from now on; nobody else may step it.
    max_waiting: continuations that may wait for a place in the batch; more are refused with
        QueueFullError.
    recorder: told about times and tokens. model_name: what clients call the model; by default the
        last part of its path.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = 256,
        recorder: Recorder | None = None,
        model_name: str | None = None,
    ) -> None:
        if max_waiting < 0:
            raise ConfigError(f"max_waiting must be at least 0, not {max_waiting}")
        self._llm, self._core, self._recorder = llm, llm.core, recorder
        self.model_name = model_name or llm.config.model.rstrip("/").rsplit("/", 1)[-1]
        self._max_waiting = max_waiting
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._sessions: dict[str, _Session] = {}
        self._tally, self._ids = Tally(), count()
        # Encoding a long prompt takes a while; one thread, since tokenizers need not be safe in
        # several.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="octavo-encode")
        # Continuations of every request that waits or runs. One that is through takes no place,
        # read or not.
        self._places: dict[object, int] = {}
        self._mean_seconds, self._began, self._deadline = 1.0, time.monotonic(), inf
        self._closing = self._stopping = False
        self._ended: OctavoError | None = None
        self._look: Future[dict[str, Any]] | None = None
        self._death: Future[None] = Future()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls, model: str, *, max_waiting: int = 256, recorder: Recorder | None = None, **options: Any
    ) -> Self:
        """Load a model with the options of ``LLM``."""
        return cls(LLM(model, **options), max_waiting=max_waiting, recorder=recorder)

    # -- clients: on the event loop ----------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None where it was not loaded."""
        return self._llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens that a request can have, prompt and output, by the model and the arena."""
        return self._llm.built.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._llm.built.spec.vocab_size

    @property
    def max_unfinished(self) -> int:
        """Most continuations that may run and wait at once."""
        return self._llm.config.max_num_seqs + self._max_waiting

    @property
    def is_alive(self) -> bool:
        """False once the engine has broken down or was closed."""
        return self._ended is None

    @property
    def stopped(self) -> bool:
        """True once the engine's thread has ended; after ``close`` a step may still be going on."""
        return not self._thread.is_alive()

    @property
    def closing(self) -> bool:
        """True once ``close`` was called."""
        return self._closing

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestDelta, None]:
        """Continue one prompt; yields what every step adds. Closing or cancelling the iterator ends
        the request.

        Raises at the first step ConfigError and CapacityError for what is wrong with the request,
        QueueFullError where too many wait; at any step StepFailedError, RequestFailedError,
        InvalidNumbersError, EngineClosedError and EngineDeadError.
        """
        async with self._session(prompt, params, options) as session:
            finished = False
            while not finished:
                delta = await session.next()
                finished = delta.finished
                yield delta

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Continue one prompt and return everything at its end. Raises what ``stream`` raises."""
        async with self._session(prompt, params, options) as session:
            while not (await session.next()).finished:
                pass
            return session.live.output()

    async def counters(self) -> EngineCounters:
        """Numbers for metrics, taken between two steps."""
        return await self._call(lambda: insight.count(self._core.scheduler, self._sums()))

    async def snapshot(self) -> dict[str, Any]:
        """Everything about requests and cache, taken between two steps, for ``json.dumps(...,
        default=vars)``.

        docs/inspecting.md says what it means. Whoever asks while another waits gets the same one:
        many who look cost no more than one.
        """
        if self._look is None or self._look.done():
            self._look = self._post(lambda: insight.describe(self._core.scheduler, self._sums()))
        found = await asyncio.shield(asyncio.wrap_future(self._look))
        return {"model": self.model_name, "uptime_seconds": time.monotonic() - self._began} | found

    async def until_dead(self) -> None:
        """Wait until the engine has broken down; for ever where it never does."""
        await asyncio.shield(asyncio.wrap_future(self._death))

    async def close(self, *, timeout: float = 30.0) -> None:
        """Refuse new requests, let those that run finish for up to ``timeout`` seconds, end the
        rest, and stop the thread.

        Called again, it can only shorten the time. A step that is being computed cannot be
        interrupted: clients are told at once, and the thread, which does not keep the process, is
            waited for until the time is over, or a second.
        """
        self._closing = True
        self._deadline = min(self._deadline, time.monotonic() + timeout)
        while self._places and self.is_alive and time.monotonic() < self._deadline:
            await asyncio.sleep(0.02)
        self._stopping = True
        self._end(EngineClosedError("the engine was shut down"))
        # Wakes the thread where it waits for commands.
        self._commands.put((lambda: None, Future()))
        at_least = time.monotonic() + 1
        while self._thread.is_alive() and time.monotonic() < max(self._deadline, at_least):
            await asyncio.sleep(0.02)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _session(
        self, prompt: Prompt, given: SamplingParams | None, options: RequestOptions
    ) -> AsyncIterator[_Session]:
        began, place = time.monotonic(), object()
        params = SamplingParams() if given is None else given
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, not {arguments.shown(params)}")
        self._refuse_unless_open(params.n)
        self._places[place] = params.n
        try:
            name = options.get("request_id")
            named: RequestOptions = {
                **options,
                "request_id": str(next(self._ids)) if name is None else name,
            }
            make = partial(self._llm.prompts.make, prompt, params, **named)
            live = await asyncio.get_running_loop().run_in_executor(self._encoder, make)
            session = _Session(live, self._recorder, began, partial(self._places.pop, place, None))
            try:
                await self._call(partial(self._enter, session))
                yield session
            finally:
                # Commands are carried out in order: whatever became of entering, after this the
                # request is gone.
                self._post(partial(self._leave, session))
                if session.entered:
                    self._mean_seconds += 0.1 * (session.end(time.monotonic()) - self._mean_seconds)
        finally:
            self._places.pop(place, None)

    def _refuse_unless_open(self, continuations: int) -> None:
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        if self._closing:
            raise EngineClosedError("the engine is shutting down and takes no new requests")
        if continuations > self.max_unfinished:
            raise ConfigError(
                f"n must be at most {self.max_unfinished} here, not {continuations}: no more run"
                " and wait"
            )
        taken, slots = sum(self._places.values()), self._llm.config.max_num_seqs
        if taken + continuations > self.max_unfinished:
            # Roughly when half of those that wait will have had their turn.
            raise QueueFullError(max(1.0, self._mean_seconds * (taken - slots) / (2 * slots)))

    def _post(self, command: Callable[[], T]) -> Future[T]:
        """Have a command carried out between two steps. It fails where the thread has ended."""
        done: Future[T] = Future()
        with self._lock:
            if self._ended is None:
                self._commands.put((command, done))
            else:
                done.set_exception(type(self._ended)(*self._ended.args))
        return done

    async def _call(self, command: Callable[[], T]) -> T:
        """Have a command carried out, and wait for what it returns or raises."""
        return await asyncio.wrap_future(self._post(command))

    # -- the engine: in its own thread -------------------------------------------------------------

    def _run(self) -> None:
        """Carry out commands and step, until told to stop or broken."""
        ended: OctavoError = EngineClosedError("the engine was shut down")
        try:
            while not self._stopping:
                self._obey(wait=not self._core.has_work)
                if self._core.has_work and not self._stopping:
                    self._deliver(self._core.step())
            # So that every page is given back.
            for request_id in self._sessions:
                self._core.abort(request_id)
        except BaseException as error:
            log.exception("the engine has stopped")
            ended = (
                error
                if isinstance(error, EngineDeadError)
                else EngineDeadError(f"the engine has stopped: {error!r}")
            )
        self._end(ended)
        if isinstance(ended, EngineDeadError):
            self._death.set_result(None)

    def _end(self, ended: OctavoError) -> None:
        """Tell all who wait, and all who will come, that nothing comes any more; from either
        thread.
        """
        with self._lock:
            self._ended = self._ended or ended
        self._hand_out([(session, self._ended) for session in list(self._sessions.values())])
        with suppress(Empty):
            while True:
                _, done = self._commands.get_nowait()
                if done.set_running_or_notify_cancel():
                    done.set_exception(self._ended)

    def _obey(self, *, wait: bool) -> None:
        """Carry out all commands there are; with ``wait``, at least one."""
        while wait or not self._commands.empty():
            command, done = self._commands.get()
            wait = False
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(command())
                except EngineDeadError as error:
                    done.set_exception(error)
                    raise
                except Exception as error:
                    done.set_exception(error)

    def _enter(self, session: _Session) -> None:
        self._core.add(session.live.request)
        self._sessions[session.live.request.request_id] = session
        session.entered = True

    def _leave(self, session: _Session) -> None:
        request_id = session.live.request.request_id
        # Another request's, where entering failed because the id was in use.
        if self._sessions.get(request_id) is session:
            del self._sessions[request_id]
            self._core.abort(request_id)

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """Turn events into deltas and hand them out."""
        items: list[tuple[_Session, RequestDelta | OctavoError]] = []
        crashes = [event.error for event in events if isinstance(event.error, StepFailedError)]
        if crashes:
            log.error("a step crashed", exc_info=crashes[0].__cause__)
        self._tally.crashed_steps += bool(crashes)
        for event in events:
            if (session := self._sessions.get(event.request_id)) is not None:
                items.append((session, item := self._item(session, event)))
                if isinstance(item, OctavoError) or session.live.finished:
                    del self._sessions[event.request_id]
        self._hand_out(items)

    def _item(self, session: _Session, event: TokenEvent) -> RequestDelta | OctavoError:
        """What a session gets of an event."""
        if event.error is not None:
            if isinstance(event.error, InvalidNumbersError):
                self._tally.invalid_numbers += 1
                log.error("request %s: %s", event.request_id, event.error)
            return event.error
        try:
            delta = session.live.advance(self._core, event)
        except EngineDeadError:
            raise
        except Exception as error:
            # Of text, not of scheduling: it is this request's alone.
            log.exception("request %s could not be told what it got", event.request_id)
            self._core.abort(event.request_id)
            return RequestFailedError(f"something broke while this request was told: {error!r}")
        self._tally.add(delta)
        return delta

    def _sums(self) -> Tally:
        self._tally.recoveries = self._core.recovery.count
        return self._tally

    def _hand_out(self, items: Sequence[tuple[_Session, RequestDelta | OctavoError]]) -> None:
        """Give every session what is its own: one call of each event loop."""
        now = time.monotonic()
        by_loop: dict[
            asyncio.AbstractEventLoop, list[tuple[_Session, RequestDelta | OctavoError]]
        ] = {}
        for session, item in items:
            by_loop.setdefault(session.loop, []).append((session, item))
        for loop, mine in by_loop.items():
            # A loop that was closed has no clients left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_fill, mine, now)


def _fill(items: Sequence[tuple[_Session, RequestDelta | OctavoError]], now: float) -> None:
    for session, item in items:
        session.take(now, item)
