"""``octavo sim --trace``: what a model's cache would make of given traffic, for every size of
memory and every eviction policy, several of them at once.

Owns the processes, the progress shown, and the tables. Imports no torch.
"""

from __future__ import annotations

import json as jsonlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import Manager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from octavo.base import ConfigError
from octavo.cache.index.policy import DEFAULT_POLICY, make_policy
from octavo.config import format_size, parse_size
from octavo.sim.generate import load_trace
from octavo.sim.page import CAUSES, Title, page
from octavo.sim.traces import TraceRequest, align
from octavo.sim.traffic import Load, TrafficReport, layout_for, send
from octavo.spec.stream import CacheDtypes, full_dtype

ASSUMED_MEMORY = "80GiB"
"""Where no memory is given, as ``octavo plan`` has it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which requests, of which trace. aligned: cut to whole blocks."""

    trace: str
    block_size: int
    aligned: bool
    limit: int | None

    def read(self) -> list[TraceRequest]:
        """The requests."""
        requests = load_trace(self.trace, block_size=self.block_size, limit=self.limit)
        return align(requests, self.block_size) if self.aligned else requests


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Whose cache: a config and what decides its bytes."""

    config: str
    profile: str
    kv_dtype: str
    indexer_dtype: str | None
    state_dtype: str
    max_model_len: int | None

    @property
    def dtypes(self) -> CacheDtypes:
        """Dtypes by torch's names."""
        return CacheDtypes(
            kv=full_dtype(self.kv_dtype),
            indexer=full_dtype(self.indexer_dtype) if self.indexer_dtype else None,
            state=full_dtype(self.state_dtype),
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: everything another process must know."""

    source: Source
    cache: Cache
    load: Load
    memory: int
    eviction: str
    check: bool

    @property
    def name(self) -> str:
        """What progress calls it."""
        return f"{format_size(self.memory)} {self.eviction}"

    def run(self, on_progress: Callable[[int], None]) -> TrafficReport:
        """Send the trace."""
        layout = layout_for(
            self.cache.config,
            memory=self.memory,
            profile=self.cache.profile,
            dtypes=self.cache.dtypes,
            max_model_len=self.cache.max_model_len,
        )
        return send(
            layout,
            self.source.read(),
            self.load,
            clock=time.process_time,
            memory=self.memory,
            eviction=self.eviction,
            check=self.check,
            on_progress=on_progress,
        )


def run(
    *,
    source: Source,
    cache: Cache,
    load: Load,
    memory: Sequence[str],
    eviction: Sequence[str],
    check: bool,
    processes: int | None,
    json: bool,
    html: Path | None,
) -> None:
    """Send the trace to a cache of every memory and policy, and show what came of it. Exits with 1
    where ``check`` finds the cache wrong.
    """
    sizes = [parse_size(size, "memory") for size in memory or (ASSUMED_MEMORY,)]
    for policy in eviction:
        make_policy(policy)
    # What is wrong with the input is told before any process starts, and once.
    requests = source.read()
    jobs = [
        Job(source=source, cache=cache, load=load, memory=size, eviction=policy, check=check)
        for policy in eviction or (DEFAULT_POLICY,)
        for size in sizes
    ]
    for job in jobs:
        layout_for(
            cache.config,
            memory=job.memory,
            profile=cache.profile,
            dtypes=cache.dtypes,
            max_model_len=cache.max_model_len,
        )
    try:
        reports = _run_all(jobs, len(requests), processes or os.cpu_count() or 1, quiet=json)
    except AssertionError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    title = _title(source, cache, load)
    if html is not None:
        _write(html, page(title, reports))
    if json:
        typer.echo(jsonlib.dumps(_to_json(title, reports)))
    elif html is None:
        _print(title, reports)


def _run_all(
    jobs: Sequence[Job], requests: int, processes: int, *, quiet: bool
) -> list[TrafficReport]:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests,"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as progress:
        tasks = [progress.add_task(job.name, total=requests) for job in jobs]
        if len(jobs) == 1 or processes == 1:
            return [
                job.run(lambda over, task=task: progress.advance(task, over))  # type: ignore[misc]
                for job, task in zip(jobs, tasks, strict=True)
            ]
        return _in_processes(
            jobs, processes, lambda index, over: progress.advance(tasks[index], over)
        )


_AT_ONCE = 16
"""Requests that a process tells of together."""


def _in_processes(
    jobs: Sequence[Job], processes: int, on_progress: Callable[[int, int], None]
) -> list[TrafficReport]:
    with Manager() as manager, ProcessPoolExecutor(min(processes, len(jobs))) as pool:
        told: Queue[tuple[int, int]] = manager.Queue()
        futures = [pool.submit(_work, job, index, told) for index, job in enumerate(jobs)]
        waiting: set[Future[TrafficReport]] = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for index, over in _drain(told):
                    on_progress(index, over)
                for future in done:
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _drain(told: Queue[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    while True:
        try:
            yield told.get_nowait()
        except Empty:
            return


def _work(job: Job, index: int, told: Queue[tuple[int, int]]) -> TrafficReport:
    """One run in a process of its own."""
    more = 0

    def tell(over: int) -> None:
        nonlocal more
        more += over
        if more >= _AT_ONCE:
            told.put((index, more))
            more = 0

    report = job.run(tell)
    told.put((index, more))
    return report


# -- what is shown ---------------------------------------------------------------------------------


def _title(source: Source, cache: Cache, load: Load) -> Title:
    path = Path(cache.config)
    model = path.parent.name if path.name == "config.json" else path.stem
    cut = f", cut to blocks of {source.block_size} and one token" if source.aligned else ""
    driven = (
        f"{load.closed} requests at once"
        if load.closed is not None
        else f"arrivals as in the trace, {load.speed:g} times as fast, steps of"
        f" {load.step_seconds * 1000:g} ms and {load.tokens_per_second:,.0f} tokens a second"
    )
    return Title(
        model=model,
        trace=f"{Path(source.trace).name}{cut}",
        driven=f"{driven}, {load.max_num_batched_tokens:,} tokens a step at most",
    )


def _to_json(title: Title, reports: Sequence[TrafficReport]) -> dict[str, Any]:
    return {**vars(title), "version": 1, "runs": [report.to_json() for report in reports]}


def _print(title: Title, reports: Sequence[TrafficReport]) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    first = reports[0]
    console.print(f"[bold]{title.model}[/]: {title.trace}; {title.driven}", highlight=False)
    console.print(
        f"{first.requests:,} requests served, {first.refused:,} too long; {first.prompt_tokens:,}"
        f" prompt tokens, of which unlimited memory would spare {first.possible_rate:.2%}",
        highlight=False,
    )
    console.print(_runs(reports))
    console.print("Why prompts hit no more, and what unlimited memory would have spared of them")
    console.print(_misses(reports))
    limited = _limited(reports)
    if limited.row_count:
        console.print("Tokens that growing groups had and others could not resume at")
        console.print(limited)
    if any(report.checked_entries for report in reports):
        checked = sum(report.checked_entries for report in reports)
        console.print(f"every one of {checked:,} entries read was the right one", highlight=False)


def _runs(reports: Sequence[TrafficReport]) -> Table:
    made = Table()
    made.add_column("eviction")
    for name in (
        "memory",
        "hits",
        "evicted tokens",
        "preempted",
        "computed again",
        "held, used at most",
        "steps",
        "µs a step",
        "first token",
    ):
        made.add_column(name, justify="right")
    for each in reports:
        made.add_row(
            each.eviction,
            format_size(each.memory),
            f"{each.hit_rate:.2%}",
            f"{each.evictions * each.hash_unit:,}",
            f"{each.preemptions:,}",
            f"{each.recomputed_tokens:,}",
            f"{each.peak_held / each.arena:.0%}, {each.peak_used / each.arena:.0%}",
            f"{each.steps:,}",
            f"{each.step_microseconds:,.0f}",
            f"{each.waits.p50:.2f} s",
        )
    return made


def _misses(reports: Sequence[TrafficReport]) -> Table:
    made = Table()
    for name in ("eviction", "memory"):
        made.add_column(name)
    for name in ("requests", "tokens missed"):
        made.add_column(name, justify="right")
    made.add_column("because")
    for each in reports:
        for cause, miss in each.misses.items():
            made.add_row(
                each.eviction,
                format_size(each.memory),
                f"{miss.requests:,}",
                f"{miss.tokens:,}",
                CAUSES[cause],
            )
    return made


def _limited(reports: Sequence[TrafficReport]) -> Table:
    made = Table()
    for name in ("eviction", "memory", "because of"):
        made.add_column(name)
    made.add_column("tokens", justify="right")
    for each in reports:
        for law, tokens in each.limited.items():
            made.add_row(each.eviction, format_size(each.memory), law, f"{tokens:,}")
    return made


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html {path} cannot be written: {error.strerror}") from error
