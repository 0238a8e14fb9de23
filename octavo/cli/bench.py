"""``octavo bench``: how fast a model answers, with clients that wait for each other's answers or
come by the clock.

Owns the load and the arithmetic of its figures. Prompts are random token ids, so no tokenizer is
read; what is measured is the engine as ``octavo serve`` runs it, without HTTP. Imports torch
through ``AsyncLLM``.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import random
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo.base import ConfigError
from octavo.cli.environment import environment
from octavo.engine.aio import AsyncLLM
from octavo.sched.sampling import SamplingParams

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What clients ask for.

    concurrency: clients of a closed loop, each asking again when it has its answer. rate: requests
    per second of an open loop, with exponential gaps; None for a closed one. requests: in each run.
    input_len, output_len: tokens.
    shared_len: tokens at the front of every prompt that are the same. runs: repetitions, each with
        prompts of its own.
    """

    concurrency: int = 8
    rate: float | None = None
    requests: int = 32
    input_len: int = 512
    output_len: int = 64
    shared_len: int = 0
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "input_len", "output_len", "runs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(f"rate must be positive, not {self.rate}")
        if not 0 <= self.shared_len <= self.input_len:
            raise ConfigError(
                f"shared_len must be between 0 and input_len {self.input_len}, not"
                f" {self.shared_len}"
            )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as its client saw it. Seconds; ``gaps`` between its tokens."""

    first: float
    total: float
    gaps: tuple[float, ...]
    cached: int


def prompts(load: Load, run: int, vocab_size: int) -> list[list[int]]:
    """Random prompts of one run. Ids of special tokens, which are the first in most vocabularies,
    are left out.
    """
    low = min(64, vocab_size - 1)
    shared = random.Random(load.seed)
    front = [shared.randrange(low, vocab_size) for _ in range(load.shared_len)]
    rng = random.Random(f"{load.seed}/{run}")
    rest = load.input_len - load.shared_len
    return [
        front + [rng.randrange(low, vocab_size) for _ in range(rest)] for _ in range(load.requests)
    ]


async def ask(llm: AsyncLLM, prompt: list[int], output_len: int) -> Answer:
    """One request, followed token by token."""
    began, times, cached = time.perf_counter(), [], 0
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    async for delta in llm.stream(prompt, params):
        if any(part.token_ids for part in delta.outputs):
            times.append(time.perf_counter())
        cached = delta.num_cached_tokens
    gaps = tuple(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return Answer(first=times[0] - began, total=times[-1] - began, gaps=gaps, cached=cached)


async def closed(load: Load, work: Sequence[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    """``concurrency`` clients that take the next request when they have their answer."""
    left = iter(work)

    async def client() -> list[Answer]:
        return [await one() for one in left]

    return [
        answer
        for part in await asyncio.gather(*(client() for _ in range(load.concurrency)))
        for answer in part
    ]


async def opened(
    load: Load, work: Sequence[Callable[[], Awaitable[Answer]]], rate: float, run: int
) -> list[Answer]:
    """Requests at random times, ``rate`` per second, whatever becomes of those before."""
    rng, tasks, due = random.Random(f"gaps {load.seed}/{run}"), [], time.perf_counter()
    for one in work:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(one()))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def summary(load: Load, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Figures of one run. Times in milliseconds, rates in tokens per second."""
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "seconds": seconds,
        "requests_per_s": len(answers) / seconds,
        "output_tokens_per_s": len(answers) * load.output_len / seconds,
        "prompt_tokens_per_s": len(answers) * load.input_len / seconds,
        "cached_prompt_tokens": sum(answer.cached for answer in answers),
        "first_token_ms": quantiles([answer.first for answer in answers]),
        "inter_token_ms": quantiles(gaps) if gaps else None,
        "request_ms": quantiles([answer.total for answer in answers]),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile in milliseconds: the smallest value that so many do not
    exceed.
    """
    ordered = sorted(seconds)
    return {
        f"p{q * 100:g}": 1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]
        for q in QUANTILES
    }


async def measure(llm: AsyncLLM, load: Load, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """All runs behind a short one that is not counted. advance: called for every answer."""
    await ask(llm, prompts(load, -1, llm.vocab_size)[0], min(4, load.output_len))
    found = []
    for run in range(load.runs):

        async def one(prompt: list[int]) -> Answer:
            answer = await ask(llm, prompt, load.output_len)
            advance()
            return answer

        work = [lambda prompt=prompt: one(prompt) for prompt in prompts(load, run, llm.vocab_size)]
        began = time.perf_counter()
        answers = await (
            closed(load, work) if load.rate is None else opened(load, work, load.rate, run)
        )
        found.append(summary(load, answers, time.perf_counter() - began))
    await llm.close()
    return found


def spread(runs: Sequence[dict[str, Any]], *path: str) -> dict[str, float]:
    """Median, least and most of one figure over the runs."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value[key]
        values.append(float(value))
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def run(model: str, load: Load, *, json: bool, output: Path | None, **options: Any) -> None:
    """Load, measure, print; ``output``: a file for the JSON object."""
    began = time.perf_counter()
    err = Console(stderr=True)
    llm = AsyncLLM.load(
        model, skip_tokenizer_init=True, max_waiting=max(256, load.requests), **options
    )
    ready = time.perf_counter() - began
    if load.input_len + load.output_len > llm.max_model_len:
        raise ConfigError(
            f"input_len {load.input_len} + output_len {load.output_len} exceed max_model_len"
            f" {llm.max_model_len}"
        )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("Requests", total=load.requests * load.runs)
        runs = asyncio.run(measure(llm, load, lambda: bar.advance(task)))
    report = {
        "model": model,
        "command": shlex.join(["octavo", *sys.argv[1:]]),
        "environment": environment(),
        "options": {name: value for name, value in options.items() if value is not None},
        "load": asdict(load),
        "ready_s": ready,
        "runs": runs,
    }
    if output is not None:
        output.write_text(jsonlib.dumps(report, indent=1) + "\n", encoding="utf-8")
    if json:
        typer.echo(jsonlib.dumps(report))
        return
    Console().print(table(load, runs, ready))


def table(load: Load, runs: Sequence[dict[str, Any]], ready: float) -> Table:
    """The figures, one a row: median over runs, and the least and most of them."""
    kind = (
        f"{load.concurrency} clients" if load.rate is None else f"{load.rate:g} requests a second"
    )
    made = Table(
        title=f"{kind}, {load.input_len} tokens in, {load.output_len} out, ready in {ready:.1f} s"
    )
    made.add_column("")
    for name in ("median", "least", "most"):
        made.add_column(name, justify="right")
    rows = [
        ("output tokens/s", ("output_tokens_per_s",)),
        ("prompt tokens/s", ("prompt_tokens_per_s",)),
        ("first token ms, p50", ("first_token_ms", "p50")),
        ("first token ms, p99", ("first_token_ms", "p99")),
        ("request ms, p50", ("request_ms", "p50")),
    ]
    if load.output_len > 1:
        rows[4:4] = [
            (f"between tokens ms, {quantile}", ("inter_token_ms", quantile))
            for quantile in ("p50", "p99")
        ]
    for name, path in rows:
        made.add_row(name, *(f"{value:,.1f}" for value in spread(runs, *path).values()))
    return made
