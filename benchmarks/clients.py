"""Clients of a load test: they ask, hang up, come in bursts, send nonsense, and judge what they
get.

Owns ``Clients`` and its record of what went well, what took how long, and what must not have
happened. Knows a URL and a pool of cases; knows no process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2

from benchmarks.traffic import Ask, Case, draw, malformed, strangers

HANG_UP, MALFORMED = 0.10, 0.05
RETRIES = 40
MAX_PROBLEMS = 50
"""Problems told in full; all are counted."""


@dataclass(kw_only=True)
class Record:
    """What happened. counts: requests by outcome. times in seconds. problems: what must not have
    happened.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, what: str) -> None:
        """Note what must not have happened."""
        self.counts["problems"] += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(what)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server. longest: tokens of a request. vocab: above every token id. max_body: bytes. queue:
    continuations it takes.
    """

    url: str
    longest: int
    vocab: int
    max_body: int
    queue: int


class Clients:
    """Any number of clients of one server, whose choices follow from ``seed``."""

    def __init__(
        self, target: Target, pool: Sequence[Case], *, seed: int, patience: float = 300.0
    ) -> None:
        self.target, self.pool, self.record = target, pool, Record()
        self._rng = Random(seed)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx2.AsyncClient(base_url=target.url, limits=limits, timeout=patience)

    # -- how many, and when ------------------------------------------------------------------------

    async def closed(self, clients: int, stop: asyncio.Event) -> None:
        """So many clients, each of which asks again when it has its answer."""

        async def one() -> None:
            while not stop.is_set():
                await self.one()

        await asyncio.gather(*(one() for _ in range(clients)))

    async def open(self, rate: float, stop: asyncio.Event) -> None:
        """Clients who come at random, ``rate`` per second, whatever became of those before them."""
        async with asyncio.TaskGroup() as coming:
            while not await _within(stop, self._rng.expovariate(rate)):
                coming.create_task(self.one())

    async def bursts(self, every: float, stop: asyncio.Event) -> None:
        """From time to time more short requests at once than the server's queue takes."""
        short = [case for case in self.pool if case.kind == "short"]
        async with asyncio.TaskGroup() as coming:
            while not await _within(stop, every):
                for _ in range(self.target.queue + self.target.queue // 2):
                    coming.create_task(self.ask(draw(self._rng.choice(short), self._rng)))

    async def one(self) -> None:
        """One request of the mix."""
        chance = self._rng.random()
        if chance < MALFORMED:
            await self.nonsense()
        else:
            ask = draw(self._rng.choice(self.pool), self._rng)
            await self.ask(ask, hang_up=chance < MALFORMED + HANG_UP)

    async def alone(self) -> None:
        """Every case once, one after another: what remains in the cache must not change an
        answer.
        """
        for case in self.pool:
            expected = case.answers
            await self.ask(
                Ask(
                    path=case.path,
                    body=case.body,
                    canary=case.canary,
                    choices=len(expected),
                    expected=expected,
                )
            )

    # -- one request -------------------------------------------------------------------------------

    async def ask(self, ask: Ask, *, hang_up: bool = False) -> None:
        """Ask until there is room, and judge the answer; with ``hang_up``, do not wait for its
        end.
        """
        # From before the request has been read to after most answers.
        moment = 10 ** self._rng.uniform(-3, 0.7) if hang_up else None
        try:
            async with asyncio.timeout(moment):
                for _ in range(RETRIES):
                    if (wait := await self._try(ask)) is None:
                        return
                    self.record.counts["queue full"] += 1
                    await asyncio.sleep(wait * self._rng.uniform(1, 1.5))
                self.record.counts["gave up"] += 1
        except TimeoutError:
            self.record.counts["hung up"] += 1
        except httpx2.HTTPError as error:
            self.record.problem(f"{ask.path} {_short(ask)}: {error!r}")

    async def _try(self, ask: Ask) -> float | None:
        """Ask once; seconds to wait where the queue is full, else None."""
        began = time.monotonic()
        async with self.http.stream("POST", ask.path, json=ask.body) as response:
            if response.status_code == 429:
                await response.aread()
                return float(response.headers["retry-after"])
            if response.status_code != 200:
                said = (await response.aread())[:300]
                self.record.problem(f"{ask.path} {_short(ask)}: {response.status_code} {said!r}")
                return None
            if ask.stream:
                texts, usage, ends = await self._read_stream(ask, response, began)
            else:
                texts, usage, ends = _whole(json.loads(await response.aread()))
        self._judge(ask, texts, usage, ends)
        self.record.whole.append(time.monotonic() - began)
        return None

    async def _read_stream(
        self, ask: Ask, response: httpx2.Response, began: float
    ) -> tuple[list[str], dict[str, Any], int]:
        """(texts, usage, choices that ended) of server-sent events."""
        texts, usage, ends, last, done = [""] * ask.choices, {}, 0, 0.0, False
        async for line in response.aiter_lines():
            if not line:
                continue
            now, data = time.monotonic(), line.removeprefix("data: ")
            if data == "[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                self.record.problem(f"{ask.path} {_short(ask)}: {data[:300]}")
                return texts, usage, ends
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] += piece
                ends += choice["finish_reason"] is not None
                if piece and ask.choices == 1:
                    (self.record.inter_token if last else self.record.first_token).append(
                        now - (last or began)
                    )
                    last = now
        if not done:
            self.record.problem(f"{ask.path} {_short(ask)}: the stream ended without [DONE]")
        return texts, usage, ends

    def _judge(self, ask: Ask, texts: Sequence[str], usage: dict[str, Any], ends: int) -> None:
        record = self.record
        if ask.expected is not None and tuple(texts) != ask.expected:
            record.problem(
                f"{ask.path} {_short(ask)}: {list(texts)} instead of {list(ask.expected)}"
            )
        if foreign := strangers(texts, ask):
            record.problem(f"{ask.path} {_short(ask)}: canaries {foreign} of others")
        if len(texts) != ask.choices or ends != ask.choices or not usage:
            record.problem(
                f"{ask.path} {_short(ask)}: {len(texts)} choices, {ends} ends, usage {usage}"
            )
            return
        record.counts["answered"] += 1
        record.counts["compared"] += ask.expected is not None
        record.prompt_tokens += usage["prompt_tokens"]
        record.completion_tokens += usage["completion_tokens"]
        record.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    async def nonsense(self) -> None:
        """Send what nobody can answer, and look at how it is refused."""
        target = self.target
        sent = malformed(
            self._rng, longest=target.longest, vocab=target.vocab, max_body=target.max_body
        )
        self.record.counts["malformed"] += 1
        try:
            headers = {"content-type": "application/json"}
            response = await self.http.post(sent.path, content=sent.content, headers=headers)
        except httpx2.HTTPError as error:
            # A body that is too large is refused before it is read, and the connection closed.
            if 413 not in sent.statuses:
                self.record.problem(f"{sent.path} {sent.content[:100]!r}: {error!r}")
            return
        if response.status_code not in (*sent.statuses, 429):
            self.record.problem(
                f"{sent.path} {sent.content[:100]!r}: {response.status_code} {response.text[:200]}"
            )
        elif not response.json()["error"]["message"]:
            self.record.problem(f"{sent.path} {sent.content[:100]!r}: refused without a reason")


def _whole(body: dict[str, Any]) -> tuple[list[str], dict[str, Any], int]:
    """(texts, usage, choices that ended) of a response in one piece."""
    choices = body["choices"]
    texts = [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
    ]
    return texts, body["usage"], sum(choice["finish_reason"] is not None for choice in choices)


def _short(ask: Ask) -> str:
    return json.dumps(ask.body)[-300:]


async def _within(stop: asyncio.Event, seconds: float) -> bool:
    """True as soon as ``stop`` is set, False after ``seconds``."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
