"""A scheduler that breaks under a server: 500 for the request that it was about, unbroken streams
for all others, and an orderly end of the process where it breaks too often.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from octavo.cache.manager import KVCacheManager
from octavo.sim.replay import read, replay
from tests.planted import Operation, PlantedError, wrapped
from tests.server.fakes import wait_until
from tests.server.test_engine import Running, idle, running, values
from tests.server.test_serve import ENDLESS, HEADERS, model, octavo_serve

__all__ = ["model", "running"]

POISON = 13
"""Priority of the request that breaks the scheduler."""

BYSTANDERS: tuple[dict[str, Any], ...] = (
    {"prompt": "a stream of many tokens", "max_tokens": 350, "temperature": 0},
    {"prompt": "two of them, drawn", "max_tokens": 40, "n": 2, "seed": 4, "temperature": 1.1},
    {"prompt": "with logprobs", "max_tokens": 30, "logprobs": 1, "seed": 2},
    {"prompt": "with its own prompt", "max_tokens": 20, "echo": True, "temperature": 0},
)


@contextmanager
def poisoned() -> Iterator[None]:
    """Looking up a request of one priority breaks the scheduler."""

    def lookup(_: Operation, call: Callable[[], Any]) -> Any:
        if call.args[1].priority == POISON:  # type: ignore[attr-defined]
            raise PlantedError("planted: nothing that a client should read")
        return call()

    with wrapped([Operation((KVCacheManager, "lookup"))], lookup):
        yield


async def stream(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[tuple[int, str]]:
    """(choice, text) of every chunk of a stream, which must end well."""
    body = {"ignore_eos": True, "stream": True, **body}
    found = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found.append((choice["index"], choice["text"]))
    return found


def joined(chunks: list[tuple[int, str]]) -> dict[int, str]:
    return {
        index: "".join(text for other, text in chunks if other == index)
        for index in {index for index, _ in chunks}
    }


def test_500_for_one_and_unbroken_streams_for_all_others(running: Running) -> None:
    victim = {"prompt": "the one that breaks it", "max_tokens": 5, "priority": POISON}

    async def ask(*, poison: bool) -> tuple[list[dict[int, str]], list[httpx2.Response]]:
        async with httpx2.AsyncClient(base_url=running.url, timeout=60) as client:
            streams = [asyncio.create_task(stream(client, body)) for body in BYSTANDERS]
            failed = []
            if poison:
                await asyncio.sleep(0.1)
                failed.append(await client.post("/v1/completions", json=victim))
                assert not streams[0].done(), "somebody was being served"
                failed.append(await client.post("/v1/completions", json={**victim, "stream": True}))
            return [joined(await one) for one in streams], failed

    calm, _ = asyncio.run(ask(poison=False))
    before = values(running)
    with poisoned():
        disturbed, failed = asyncio.run(ask(poison=True))
    assert disturbed == calm
    for response in failed:
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("request_failed", "server_error")
        assert "planted" not in response.text
    assert wait_until(lambda: idle(running))
    after = values(running)
    assert (
        after["octavo_engine_recoveries_total", ""] - before["octavo_engine_recoveries_total", ""]
        == 2
    )
    assert after["octavo_requests_finished_total", "error"] == 2 + before.get(
        ("octavo_requests_finished_total", "error"), 0
    )
    assert httpx2.get(f"{running.url}/health").status_code == 200
    assert asyncio.run(ask(poison=False))[0] == calm


BREAKS = f"""
from octavo.cli.main import main
from octavo.sched.scheduler import Scheduler

schedule = Scheduler.schedule

def broken(self):
    assert all(request.priority != {POISON} for request in self.requests), "planted"
    return schedule(self)

Scheduler.schedule = broken
main()
"""


def test_the_third_time_within_a_minute_the_process_ends(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = tmp_path / "dumps"
    arguments = ("--max-model-len", "4000", "--dump-dir", str(dumps))
    with octavo_serve(model, *arguments, program=("-c", BREAKS)) as (process, base, _):
        with (
            httpx2.Client(base_url=base, headers=HEADERS, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=ENDLESS) as endless,
        ):
            lines = endless.iter_lines()
            next(lines)
            assert httpx2.get(f"{base}/health").status_code == 200
            body = {"prompt": "poison", "priority": POISON}
            poison = httpx2.post(f"{base}/v1/completions", json=body, headers=HEADERS, timeout=60)
            assert poison.status_code == 500
            assert poison.json()["error"]["code"] == "engine_dead"
            health = httpx2.get(f"{base}/health")
            assert health.status_code == 503
            assert health.json()["error"]["code"] == "engine_dead"
            *_, broken = [line for line in lines if line]
            assert '"code":"engine_dead"' in broken
        assert process.wait(20) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.count("the scheduler broke") == 3
    assert "so the engine stops" in said and "the engine has stopped" in said
    records = [read(dump) for dump in sorted(dumps.iterdir())]
    assert len(records) == 3
    assert all(record.failure.type == "AssertionError" for record in records)
    # Of these the recorded octavo was to blame: this one has no such bug.
    assert all(replay(record).error is None for record in records)
