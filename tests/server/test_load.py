"""The load test's own clients against a server in this process, for seconds: what must hold after
minutes holds after these.

The oracle is an ``LLM`` without a prefix cache that is given one prompt at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest

from benchmarks.clients import Clients, Record, Target
from benchmarks.load import (
    MAX_BODY,
    Sample,
    Traffic,
    drive,
    growth,
    miscounted,
    read_cache,
    read_metrics,
    settle,
)
from benchmarks.traffic import Case, make_pool
from octavo.engine.aio import AsyncLLM
from octavo.observe.metrics import Metrics
from octavo.server.app import create_app
from tests.server.fakes import serving
from tests.server.test_engine import write_model

LONGEST, SLOTS, WAITING = 400, 6, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def made(model: Path) -> tuple[list[Case], int]:
    return make_pool(model, 20, seed=3, max_tokens=12, max_model_len=LONGEST)


@pytest.fixture
def url(model: Path) -> Iterator[str]:
    metrics = Metrics()
    engine = AsyncLLM.load(
        str(model),
        recorder=metrics,
        max_waiting=WAITING,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=128,
        dtype="float32",
        device="cpu",
        kv_memory="1MiB",
        max_model_len=LONGEST,
    )
    with serving(create_app(engine, metrics=metrics, max_body_bytes=MAX_BODY)) as url:
        yield url


def loaded(
    url: str, pool: Sequence[Case], vocab: int, traffic: Traffic
) -> tuple[Record, dict[str, float]]:
    """What clients met, and the server's metrics at rest."""

    async def run() -> tuple[Record, dict[str, float]]:
        queue = SLOTS + WAITING
        clients = Clients(
            Target(url=url, longest=LONGEST, vocab=vocab, max_body=MAX_BODY, queue=queue),
            pool,
            seed=traffic.seed,
        )
        async with clients.http:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(traffic.seconds, stop.set)
            await drive(clients, traffic, stop)
            assert await settle(clients.http) == []
            await clients.alone()
            assert await settle(clients.http) == []
            return clients.record, await read_metrics(clients.http)

    return asyncio.run(run())


def test_nobody_gets_anything_wrong_and_nothing_stays_behind(
    url: str, made: tuple[list[Case], int]
) -> None:
    pool, vocab = made
    traffic = Traffic(mode="mixed", clients=8, rate=4.0, seconds=6.0, burst_every=2.0, seed=5)
    record, metrics = loaded(url, pool, vocab, traffic)
    assert record.problems == []
    counts = record.counts
    assert counts["compared"] > len(pool)
    assert all(counts[what] for what in ("queue full", "hung up", "malformed"))
    assert record.first_token and record.inter_token
    assert metrics["octavo_generated_tokens_total"] >= record.completion_tokens
    assert metrics["octavo_evicted_nodes_total"] > 0


def test_a_wrong_answer_is_a_problem(url: str, made: tuple[list[Case], int]) -> None:
    pool, vocab = made
    swapped = [
        Case(
            kind=case.kind,
            canary=case.canary,
            path=case.path,
            body=other.body,
            answers=case.answers,
        )
        for case, other in zip(pool, [*pool[1:], pool[0]], strict=True)
        if case.path == other.path and len(case.answers) == len(other.answers)
    ]
    traffic = Traffic(mode="closed", clients=0, rate=0.0, seconds=0.0, burst_every=9.0, seed=5)
    record, _ = loaded(url, swapped, vocab, traffic)
    assert record.counts["problems"] == len(swapped) > 0
    assert "instead of" in record.problems[0]


def test_pages_that_do_not_add_up_are_told(url: str) -> None:
    async def look() -> dict[str, object]:
        async with httpx2.AsyncClient(base_url=url) as http:
            return await read_cache(http)

    cache = asyncio.run(look())
    assert miscounted(cache) == []
    cache["arena"]["free_slabs"] -= 1  # type: ignore[index]
    assert "slabs of" in miscounted(cache)[0]


def test_growth_is_of_the_second_half() -> None:
    def sample(seconds: float, rss: int) -> Sample:
        zeros = dict.fromkeys(
            ("running", "waiting", "held", "cached", "limbo", "nodes", "ghosts"), 0
        )
        return Sample(seconds=seconds, rss=rss, preemptions=0, evicted=0, **zeros)

    first = [sample(time, 10_000 * time) for time in range(10)]
    found = growth([*first, *(sample(10 + time, 90_000 + 3 * time) for time in range(11))])
    assert found["bytes_per_hour"] == pytest.approx(3 * 3600)
    assert found["grown_bytes"] == pytest.approx(30)
    assert found["range_bytes"] == 30
