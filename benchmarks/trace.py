"""A published trace through scheduler and cache: seconds, hits and evictions on real layouts.

Owns the matrix and what it prints; a run is ``octavo.sim.traffic``. The form is that of the peer's
figures it stands beside: conversations, prompts cut to whole blocks of 512 tokens and one token of
their own, eight requests running, 8,192 tokens a step. Seconds are processor time in scheduler
*and* cache over all steps, hashing included; the peer's are those of its cache alone, hashing
included. Every run has a process of its own, one after another.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from octavo.cache.index.policy import DEFAULT_POLICY
from octavo.sim.generate import load_trace
from octavo.sim.traces import align
from octavo.sim.traffic import Load, layout_for, send
from octavo.spec.stream import CacheDtypes


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What vLLM 0.32's own manager does here: seconds, measured on the trace before it was aligned,
    and percent of prompt tokens hit.
    """

    seconds: float
    hits: float


MODELS = {
    "gpt-oss-120b": CacheDtypes(kv="bfloat16"),
    "bamba-9b": CacheDtypes(kv="bfloat16", state="bfloat16"),
    "qwen3-next-80b-a3b": CacheDtypes(kv="bfloat16", state="bfloat16"),
    "deepseek-v4-flash": CacheDtypes(kv="float8_e4m3fn"),
}
"""Models, and the dtypes that the peer keeps their caches in."""

PEER = {
    ("gpt-oss-120b", 20): Peer(seconds=12.9, hits=4.03),
    ("gpt-oss-120b", 80): Peer(seconds=12.8, hits=8.89),
    ("bamba-9b", 20): Peer(seconds=31.4, hits=0.96),
    ("bamba-9b", 80): Peer(seconds=48.6, hits=14.99),
    ("qwen3-next-80b-a3b", 20): Peer(seconds=13.4, hits=0.54),
    ("qwen3-next-80b-a3b", 80): Peer(seconds=13.2, hits=10.20),
    ("deepseek-v4-flash", 20): Peer(seconds=33.1, hits=14.52),
    ("deepseek-v4-flash", 80): Peer(seconds=47.6, hits=28.13),
}

SECONDS = {"gpt-oss-120b": 15.0, "bamba-9b": 25.0, "deepseek-v4-flash": 25.0}
"""Targets at 20 GiB, processor seconds."""

HITS = {
    ("gpt-oss-120b", 20): 6.5,
    ("qwen3-next-80b-a3b", 20): 7.0,
    ("bamba-9b", 20): 8.0,
    ("deepseek-v4-flash", 20): 19.0,
    ("gpt-oss-120b", 80): 12.5,
    ("qwen3-next-80b-a3b", 80): 15.0,
    ("bamba-9b", 80): 22.0,
    ("deepseek-v4-flash", 80): 29.0,
}
"""Targets, percent of prompt tokens."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    trace: Path
    config: Path
    gib: int
    eviction: str
    profile: str
    running: int
    limit: int | None
    usual_dtypes: bool


def measure(case: Case) -> dict[str, Any]:
    """One run, with what was there before out of the garbage collector's sight."""
    name = case.config.stem
    dtypes = CacheDtypes() if case.usual_dtypes else MODELS.get(name, CacheDtypes())
    requests = align(load_trace(str(case.trace), limit=case.limit))
    layout = layout_for(case.config, memory=case.gib << 30, profile=case.profile, dtypes=dtypes)
    gc.collect()
    gc.freeze()
    report = send(
        layout,
        requests,
        Load(closed=case.running),
        clock=time.process_time,
        memory=case.gib << 30,
        eviction=case.eviction,
    )
    return {"model": name, "gib": case.gib, "dtypes": vars(dtypes), **report.to_json()}


def table(results: list[dict[str, Any]]) -> Table:
    """One row per run, beside the peer and the targets."""
    made = Table(title="A trace of conversations through scheduler and cache", title_justify="left")
    for name in ("model", "GiB", "eviction"):
        made.add_column(name, justify="right" if name == "GiB" else "left")
    for name in (
        "seconds",
        "schedule",
        "receipts",
        "µs a step",
        "vLLM's cache",
        "target",
        "hits %",
        "vLLM's",
        "target",
        "possible",
        "evicted tokens",
        "preempted",
    ):
        made.add_column(name, justify="right")
    for each in results:
        place = each["model"], each["gib"]
        peer, seconds = PEER.get(place), each["seconds"]
        wanted = SECONDS.get(each["model"]) if each["gib"] == 20 else None
        made.add_row(
            each["model"],
            str(each["gib"]),
            each["eviction"],
            f"{each['manager_seconds']:.1f}",
            f"{seconds['schedule']:.1f}",
            f"{seconds['commit']:.1f}",
            f"{each['step_microseconds']:.0f}",
            "" if peer is None else f"{peer.seconds:.1f}",
            "" if wanted is None else f"{wanted:.0f}",
            f"{100 * each['hit_rate']:.2f}",
            "" if peer is None else f"{peer.hits:.2f}",
            f"{HITS[place]:.1f}" if place in HITS else "",
            f"{100 * each['possible_rate']:.2f}",
            f"{each['evictions'] * each['hash_unit']:,}",
            f"{each['preemptions']:,}",
        )
    return made


def main(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake's format.")],
    configs: Annotated[Path, typer.Option(help="Directory of config files.")] = Path(
        "tests/data/configs"
    ),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Name of a config; default four models.", show_default=False),
    ] = None,
    gib: Annotated[
        list[int] | None,
        typer.Option(help="Memory in GiB; default 20 and 80.", show_default=False),
    ] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy; default the first.", show_default=False),
    ] = None,
    profile: Annotated[str, typer.Option(help="Device profile: cpu or gpu.")] = "gpu",
    running: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    limit: Annotated[
        int | None, typer.Option(help="Most requests of the trace.", show_default=False)
    ] = None,
    usual_dtypes: Annotated[
        bool, typer.Option("--usual-dtypes", help="octavo's defaults instead of the peer's.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.", show_default=False)
    ] = None,
) -> None:
    """Measure and print."""
    cases = [
        Case(
            trace=trace,
            config=configs / f"{name}.json",
            gib=size,
            eviction=policy,
            profile=profile,
            running=running,
            limit=limit,
            usual_dtypes=usual_dtypes,
        )
        for name in model or MODELS
        for size in gib or (20, 80)
        for policy in eviction or (DEFAULT_POLICY,)
    ]
    console = Console(stderr=True)
    results = []
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        for result in track(
            pool.map(measure, cases), description="Sending", total=len(cases), console=console
        ):
            results.append(result)
            console.print(
                f"{result['model']}, {result['gib']} GiB, {result['eviction']}:"
                f" {result['manager_seconds']:.1f} s, {result['hit_rate']:.2%}"
            )
    Console(width=180).print(table(results))
    if out is not None:
        about = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "command": sys.argv,
        }
        out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
