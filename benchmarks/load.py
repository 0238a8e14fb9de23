"""A load test of ``octavo serve``: traffic of every sort for some minutes, and then nothing may
have stayed behind.

Owns the server process, its samples, what must hold at the end, and the report.
``benchmarks/traffic.py`` says what is sent, ``benchmarks/clients.py`` how. Exits with 1 where
anything that must hold did not:

- every answer that can be known equals the single-request answer, and no response has another
  prompt's canary;
- what is malformed is refused with the right status and a reason, and nothing gets a 5xx;
- afterwards nothing runs or waits, no page is held or in limbo, and free and cached pages are all
  there are;
- the server wrote nothing to its log, and its memory did not grow;
- it ends with 0 when told to.

Run from the root of the repository: ``python -m benchmarks.load``.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import numpy as np
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.clients import Clients, Record, Target
from benchmarks.traffic import Case, make_pool

ROOT = Path(__file__).resolve().parents[1]
MAX_BODY = 1 << 20
SETTLE_SECONDS = 30.0
GROWTH_BYTES = 8 << 20
"""Growth over the second half, along a fitted line, that still counts as flat: what allocators take
and give back.
"""

BUSY = ("octavo_requests_running", "octavo_requests_waiting")
FAILURES = ("5xx", "octavo_crashed_steps_total")

Mode = Literal["closed", "open", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The server at one moment. seconds: since traffic began. rss: bytes of the process. held,
    cached, limbo: pages.
    """

    seconds: float
    rss: int
    running: float
    waiting: float
    held: int
    cached: int
    limbo: int
    nodes: int
    ghosts: int
    preemptions: float
    evicted: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How clients come. rate: per second. burst_every: seconds between bursts beyond the queue."""

    mode: Mode
    clients: int
    rate: float
    seconds: float
    burst_every: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Process:
    """A running server. log: what it writes to standard error."""

    popen: subprocess.Popen[str]
    url: str
    log: Path

    def rss(self) -> int:
        """Bytes of memory that the process has in use."""
        status = Path(f"/proc/{self.popen.pid}/status")
        if status.exists():
            return int(re.findall(r"VmRSS:\s+(\d+) kB", status.read_text())[0]) * 1024
        return (
            int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(self.popen.pid)], text=True))
            * 1024
        )


@contextmanager
def octavo_serve(model: Path, directory: Path, *options: str) -> Iterator[Process]:
    """``octavo serve`` on a free port, ready. Raises RuntimeError with its log where it does not
    start.
    """
    command = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        str(model),
        "--port",
        "0",
        "--max-body",
        str(MAX_BODY),
        *options,
    ]
    log = directory / "server.log"
    with log.open("w") as errors:
        popen = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert popen.stdout is not None
        try:
            ready = popen.stdout.readline()
            if not ready:
                raise RuntimeError(f"{shlex.join(command)} did not start: {log.read_text()}")
            yield Process(popen=popen, url=ready.split(" at ")[1].split("/v1 ")[0], log=log)
        finally:
            popen.kill()
            popen.wait()


async def take_sample(clients: Clients, *, seconds: float, rss: int) -> Sample:
    """Ask the server how it is. Its pages must add up, whatever is going on."""
    metrics, cache = await read_metrics(clients.http), await read_cache(clients.http)
    for wrong in miscounted(cache):
        clients.record.problem(f"after {seconds:.0f} s {wrong}")
    pages = {
        state: sum(bucket[state] for bucket in cache["buckets"])
        for state in ("held", "cached", "limbo")
    }
    return Sample(
        seconds=seconds,
        rss=rss,
        **pages,
        running=metrics["octavo_requests_running"],
        waiting=metrics["octavo_requests_waiting"],
        nodes=cache["index"]["nodes"],
        ghosts=cache["index"]["ghosts"],
        preemptions=metrics["octavo_preemptions_total"],
        evicted=metrics["octavo_evicted_nodes_total"],
    )


async def read_metrics(http: httpx2.AsyncClient) -> dict[str, float]:
    """Sums of all metrics over their labels; ``5xx`` has the responses with such a status."""
    found = {"5xx": 0.0}
    for family in text_string_to_metric_families(
        (await http.get("/metrics")).raise_for_status().text
    ):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
            if sample.name == "octavo_http_responses_total" and sample.labels["status"].startswith(
                "5"
            ):
                found["5xx"] += sample.value
    return found


async def read_cache(http: httpx2.AsyncClient) -> dict[str, Any]:
    """Arena, buckets, index, as ``/cache`` tells them."""
    return (await http.get("/cache")).raise_for_status().json()["cache"]


def miscounted(cache: dict[str, Any]) -> list[str]:
    """Buckets whose pages are not free, held, cached or in limbo, and slabs that are nowhere."""
    wrong = []
    for index, bucket in enumerate(cache["buckets"]):
        total = bucket["slabs"] * bucket["pages_per_slab"]
        if sum(bucket[state] for state in ("free", "held", "cached", "limbo")) != total:
            wrong.append(f"bucket {index} has {total} pages: {bucket}")
    slabs = sum(bucket["slabs"] for bucket in cache["buckets"]) + cache["arena"]["free_slabs"]
    if slabs != cache["arena"]["num_slabs"]:
        wrong.append(f"{slabs} slabs of {cache['arena']['num_slabs']}")
    return wrong


async def drive(clients: Clients, traffic: Traffic, stop: asyncio.Event) -> None:
    """Traffic until ``stop``, and then until everyone has an answer."""
    coming: list[Awaitable[None]] = [clients.bursts(traffic.burst_every, stop)]
    if traffic.mode != "open":
        coming.append(clients.closed(traffic.clients, stop))
    if traffic.mode != "closed":
        coming.append(clients.open(traffic.rate, stop))
    await asyncio.gather(*coming)


async def load(
    process: Process, clients: Clients, traffic: Traffic, *, every: float
) -> list[Sample]:
    """Drive, with a progress bar and a sample ``every`` so many seconds, and wait for the last
    answers.
    """
    stop, samples, began = asyncio.Event(), [], time.monotonic()
    driving = asyncio.create_task(drive(clients, traffic, stop))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Load", total=traffic.seconds, said="")
        while (now := time.monotonic() - began) < traffic.seconds and not driving.done():
            samples.append(await take_sample(clients, seconds=now, rss=process.rss()))
            counts = clients.record.counts
            said = (
                f"{counts['answered']:,} answered, {counts['problems']} problems,"
                f" {samples[-1].rss / 2**20:,.1f} MiB"
            )
            bar.update(task, completed=now, said=said)
            await asyncio.wait([driving], timeout=min(every, traffic.seconds - now))
        stop.set()
        bar.update(task, completed=traffic.seconds, said="waiting for the last answers")
        await driving
    return samples


async def settle(http: httpx2.AsyncClient) -> list[str]:
    """What is not as it must be once nobody asks for anything any more."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics, cache = await read_metrics(http), await read_cache(http)
        busy = [f"{name} is {metrics[name]:.0f}" for name in BUSY if metrics[name]]
        busy += [
            f"bucket {index}: {bucket}"
            for index, bucket in enumerate(cache["buckets"])
            if bucket["held"] + bucket["limbo"]
        ]
        if not busy or time.monotonic() > deadline:
            return (
                busy
                + miscounted(cache)
                + [f"{name} is {metrics[name]:.0f}" for name in FAILURES if metrics[name]]
            )
        await asyncio.sleep(0.1)


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Memory over the second half: bytes per hour and over the half along a fitted line, and what
    lies between the extremes.
    """
    half = [one for one in samples if one.seconds >= samples[-1].seconds / 2]
    if len(half) < 3:
        return {"bytes_per_hour": 0.0, "grown_bytes": 0.0, "range_bytes": 0.0}
    seconds, rss = (
        np.array([one.seconds for one in half]),
        np.array([one.rss for one in half], float),
    )
    slope = float(np.polyfit(seconds - seconds[0], rss, 1)[0])
    return {
        "bytes_per_hour": slope * 3600,
        "grown_bytes": slope * float(seconds[-1] - seconds[0]),
        "range_bytes": float(rss.max() - rss.min()),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 in milliseconds."""
    found = np.percentile(values, (50, 95, 99)) * 1000 if values else (0.0, 0.0, 0.0)
    return dict(zip(("p50", "p95", "p99"), map(float, found), strict=True))


def figures(record: Record, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Everything measured, for JSON."""
    return {
        "counts": dict(record.counts.most_common()),
        "first_token_ms": percentiles(record.first_token),
        "inter_token_ms": percentiles(record.inter_token),
        "request_ms": percentiles(record.whole),
        "requests_per_second": record.counts["answered"] / seconds,
        "output_tokens_per_second": record.completion_tokens / seconds,
        "prompt_tokens_per_second": record.prompt_tokens / seconds,
        "cached_share": record.cached_tokens / max(1, record.prompt_tokens),
        "preemptions": samples[-1].preemptions,
        "evicted_nodes": samples[-1].evicted,
        "rss": {"first": samples[0].rss, "last": samples[-1].rss, **growth(samples)},
    }


def about() -> dict[str, Any]:
    """Hardware, versions, commit and command."""
    cpu = (
        re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if Path("/proc/cpuinfo").exists()
        else []
    )

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": (
            git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
        ),
        "command": shlex.join(["python", "-m", "benchmarks.load", *sys.argv[1:]]),
    }


def show(found: dict[str, Any], problems: Sequence[str]) -> None:
    """The figures as a table, then what went wrong."""
    table = Table("", "p50", "p95", "p99", title="octavo serve under load")
    for name in ("first_token", "inter_token", "request"):
        table.add_row(
            f"{name.replace('_', ' ')} (ms)",
            *(f"{value:,.1f}" for value in found[f"{name}_ms"].values()),
        )
    console, rss = Console(), found["rss"]
    console.print(table)
    console.print(", ".join(f"{name} {number:,}" for name, number in found["counts"].items()))
    console.print(
        f"{found['requests_per_second']:.1f} answers/s, {found['output_tokens_per_second']:,.0f}"
        f" tokens/s out, {found['prompt_tokens_per_second']:,.0f} tokens/s in"
        f" ({found['cached_share']:.0%} cached), {found['preemptions']:,.0f} preemptions,"
        f" {found['evicted_nodes']:,.0f} nodes evicted"
    )
    console.print(
        f"memory {rss['first'] / 2**20:,.1f} MiB at first, {rss['last'] / 2**20:,.1f} at last;"
        f" second half: {rss['bytes_per_hour'] / 2**20:+,.1f} MiB/h, range"
        f" {rss['range_bytes'] / 2**20:,.1f} MiB"
    )
    for problem in problems:
        console.print(f"WRONG: {problem}", markup=False, highlight=False)
    console.print(
        "all that must hold holds"
        if not problems
        else f"{len(problems)} things that must hold did not"
    )


def write_tiny(directory: Path) -> Path:
    """A tiny Gemma 3 with random weights, a byte tokenizer and a chat template."""
    from tests.server.test_engine import write_model

    return write_model(directory)


async def judge(
    process: Process, target: Target, pool: list[Case], traffic: Traffic, *, every: float
) -> tuple[dict[str, Any], list[Sample], list[str]]:
    """Traffic, rest, everyone alone, rest: (figures, samples, what must not have happened)."""
    clients = Clients(target, pool, seed=traffic.seed)
    samples = await load(process, clients, traffic, every=every)
    problems = await settle(clients.http)
    found = figures(clients.record, samples, traffic.seconds)
    await clients.alone()
    problems += await settle(clients.http)
    await clients.http.aclose()
    return found, samples, clients.record.problems + problems


def main(
    model: Annotated[
        Path | None, typer.Argument(help="Directory or .gguf file. Default: a tiny random model.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="closed: clients wait for answers; open: they come anyway.")
    ] = "mixed",
    clients: Annotated[int, typer.Option(help="Clients of the closed loop.")] = 12,
    rate: Annotated[float, typer.Option(help="Requests per second of the open loop.")] = 2.0,
    minutes: Annotated[float, typer.Option(help="Minutes of traffic.")] = 2.0,
    burst_every: Annotated[
        float, typer.Option(help="Seconds between bursts beyond the queue.")
    ] = 30.0,
    cases: Annotated[int, typer.Option(help="Prompts with known answers.")] = 96,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 24,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of prompt and answer.")] = 1536,
    kv_memory: Annotated[
        str, typer.Option(help="Of the server's cache; small, so that it evicts and preempts.")
    ] = "3MiB",
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in one step.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait.")] = 24,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 256,
    sample_every: Annotated[float, typer.Option(help="Seconds between samples.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of prompts and traffic.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for everything as JSON.")] = None,
) -> None:
    """Serve, drive, judge."""
    traffic = Traffic(
        mode=mode,
        clients=clients,
        rate=rate,
        seconds=minutes * 60,
        burst_every=burst_every,
        seed=seed,
    )
    options = {
        "dtype": "float32",
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = model or write_tiny(directory)
        pool, vocab = make_pool(
            model, cases, seed=seed, max_tokens=max_tokens, max_model_len=max_model_len
        )
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with octavo_serve(
            model, directory, *words, f"--max-waiting={max_waiting}", "--device=cpu"
        ) as process:
            queue = max_num_seqs + max_waiting
            target = Target(
                url=process.url, longest=max_model_len, vocab=vocab, max_body=MAX_BODY, queue=queue
            )
            found, samples, problems = asyncio.run(
                judge(process, target, pool, traffic, every=sample_every)
            )
            process.popen.send_signal(signal.SIGTERM)
            if (code := process.popen.wait(60)) != 0:
                problems.append(f"the server ended with {code}")
            if log := process.log.read_text():
                problems.append(f"the server's log: {log[-4000:]}")
    if (grown := found["rss"]["grown_bytes"]) > GROWTH_BYTES:
        problems.append(f"memory grew by {grown / 2**20:.1f} MiB in the second half")
    show(found, problems)
    if output is not None:
        whole = {
            "about": about(),
            "traffic": asdict(traffic),
            "engine": options,
            **found,
            "problems": problems,
        }
        output.write_text(
            json.dumps({**whole, "samples": [asdict(one) for one in samples]}, indent=1)
        )
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
