"""An engine that computes nothing: tests say what it answers and see what became of every request.
And servers in threads.

Owns ``FakeEngine`` (what endpoints ask of ``AsyncLLM``, with a byte tokenizer) and ``serving``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.base import CapacityError, ConfigError
from octavo.cache.inspect import PageCounts
from octavo.cache.report import HitExplanation, MissCause
from octavo.engine.aio import EngineClosedError
from octavo.engine.insight import EngineCounters
from octavo.engine.outputs import CompletionDelta, RequestDelta
from octavo.memory.page import Counts
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import TokenLogprobs
from tests.engine.test_text import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + (m['content'] | trim) + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANSWER = "Grüße, 世界!"
EXPLANATION = HitExplanation(
    prompt_tokens=40,
    hit_tokens=16,
    matched_tokens=32,
    reach=(("window 16", 16), ("everything", 32)),
    limited_by=("window 16",),
    cause=MissCause.NO_CHECKPOINT,
    reason="no resume point behind 16 tokens",
)
PAGES = Counts(free=1, held=2, cached=3, limbo=4)


class FakeEngine:
    """Answers every prompt with ``answer``, a byte at a time.

    pace: seconds before every token. stalls_at: the token that never comes. error: raised at the
    first step. breaks: (tokens, what is raised after them). calls: (request id, prompt, params,
    options). open: requests being streamed. ended: those that no longer are.
    """

    model_name = "fake"
    max_model_len = 200
    vocab_size = 257
    max_unfinished = 320

    def __init__(self, answer: str = ANSWER) -> None:
        self.tokenizer = byte_tokenizer()
        self.tokenizer.backend.chat_template = TEMPLATE
        self.answer, self.pace = answer, 0.0
        self.stalls_at: int | None = None
        self.error: Exception | None = None
        self.breaks: tuple[int, Exception] | None = None
        self.calls: list[tuple[str, list[int], SamplingParams, dict[str, Any]]] = []
        self.open: set[str] = set()
        self.ended: list[str] = []
        self.is_alive, self.closing = True, False

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestDelta, None]:
        self.calls.append((request_id, list(prompt), params, options))
        if self.closing:
            raise EngineClosedError("the engine is shutting down and takes no new requests")
        if self.error is not None:
            raise self.error
        if len(prompt) >= self.max_model_len:
            raise CapacityError(
                f"{len(prompt)} prompt tokens and 1 more are beyond the limit of"
                f" {self.max_model_len}"
            )
        if not prompt or max(prompt) >= self.vocab_size:
            raise ConfigError(f"prompt: {list(prompt)} is wrong")
        self.open.add(request_id)
        try:
            async for delta in self._deltas(prompt, params, request_id):
                yield delta
        finally:
            self.open.discard(request_id)
            self.ended.append(request_id)

    async def _deltas(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestDelta, None]:
        ids = self.tokenizer.encode(self.answer)[: params.max_tokens]
        scored = (
            None
            if params.prompt_logprobs is None
            else (None, *(score(token) for token in prompt[1:]))
        )
        if not ids:
            yield RequestDelta(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                outputs=(CompletionDelta(index=0, text="", token_ids=(), finish_reason="length"),),
                prompt_logprobs=scored,
                finished=True,
            )
        for position, token in enumerate(ids):
            if position == self.stalls_at:
                await asyncio.Event().wait()
            if self.breaks is not None and position == self.breaks[0]:
                raise self.breaks[1]
            await asyncio.sleep(self.pace)
            last = position == len(ids) - 1
            for branch in range(params.n):
                first = position == 0 and branch == 0
                yield RequestDelta(
                    request_id=request_id,
                    prompt_token_ids=list(prompt) if first else [],
                    outputs=(
                        CompletionDelta(
                            index=branch,
                            text=self._piece(ids, position),
                            token_ids=(token,),
                            finish_reason=(
                                ("length" if len(ids) == params.max_tokens else "stop")
                                if last
                                else None
                            ),
                            logprobs=(
                                None
                                if params.logprobs is None
                                else (score(token, params.logprobs),)
                            ),
                        ),
                    ),
                    num_cached_tokens=16,
                    prompt_logprobs=scored if first else None,
                    explanation=EXPLANATION if first else None,
                    cache_report=None,
                    finished=last and branch == params.n - 1,
                )

    def _piece(self, ids: Sequence[int], position: int) -> str:
        before, after = (
            bytes_of(self, ids[:end]).decode(errors="ignore") for end in (position, position + 1)
        )
        return after[len(before) :]

    async def counters(self) -> EngineCounters:
        return EngineCounters(
            num_running=2,
            num_waiting=1,
            preemptions=3,
            prompt_tokens=100,
            cached_tokens=40,
            generated_tokens=7,
            crashed_steps=1,
            recoveries=12,
            invalid_numbers=13,
            finished={"stop": 4},
            misses={("window 16", "no_checkpoint"): 5},
            laws=("everything", "window 16"),
            page_bytes=(4096, 8192),
            pages=PageCounts(
                buckets=(PAGES, PAGES),
                groups=(PAGES, PAGES),
                free_slabs=9,
                compactions=6,
                moved_pages=8,
                evicted_nodes=11,
            ),
        )

    async def snapshot(self) -> dict[str, Any]:
        return {"model": self.model_name, "cache": {}}

    async def close(self, *, timeout: float = 30.0) -> None:
        self.closing = True
        deadline = time.monotonic() + timeout
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def bytes_of(engine: FakeEngine, ids: Sequence[int]) -> bytes:
    return b"".join(engine.tokenizer.token_bytes(token) for token in ids)


def score(token: int, count: int = 1) -> TokenLogprobs:
    """A logprob that says which token it is of."""
    top = tuple((other, -float(other)) for other in range(65, 65 + count))
    return TokenLogprobs(token_id=token, logprob=-token / 10, rank=count + 1, top=top)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve an app from a thread; gives its URL."""
    taken = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_until(done: Any, seconds: float = 5.0) -> bool:
    """True once ``done()`` is, False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(done())
