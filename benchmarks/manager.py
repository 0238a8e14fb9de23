"""What the cache manager costs, without a model: microseconds per call on the layouts of real
models.

Owns the matrix and what it prints. The method is that of the peers' figures it stands beside: 256
running requests whose contexts grow from 2,048 tokens, averaged over windows of 128 steps, so that
block borders and checkpoints are inside; a fresh prompt of 32,768 tokens in chunks of 8,192;
lookups of prompts that are cached whole. The arena is large, so nothing is evicted, but for fresh
prompts on a full cache: there a smaller one is filled with other prompts until it evicts, and the
same is measured after everything was forgotten.
A decode step is everything the manager does for one: asking which rows need pages, taking them,
planning all groups' addresses, and the receipt. Aligned rows cross borders together, staggered ones
in turn. Times are processor time.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from octavo.cache.inspect import count_pages
from octavo.cache.layout import PROFILES, CacheLayout, solve_layout
from octavo.cache.manager import Admission, KVCacheManager
from octavo.plan.planner import read_model
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.spec.stream import CacheDtypes

MODELS = ("llama-3.1-8b", "gpt-oss-120b", "bamba-9b", "deepseek-v4-flash")
ROWS, CONTEXT, WINDOW = 256, 2048, 128
PROMPT, CHUNK = 32_768, 8_192
TARGETS = {
    "decode step, aligned": 90.0,
    "decode step, staggered": 200.0,
    "fresh 32K: hash + lookup + allocate": 700.0,
    "lookup 128K, cached": 300.0,
}
"""Microseconds."""
FULL, EMPTY = "fresh 32K on a full cache", "fresh 32K on an empty cache"
WHOLE = ", to its end"
RATIO = 2.0
"""What ``FULL`` may take at most, in ``EMPTY``."""


@dataclass(kw_only=True)
class Times:
    """Microseconds of every call by its name, in order of first appearance."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, seconds: float) -> None:
        """Add one sample."""
        self.samples.setdefault(name, []).append(seconds * 1e6)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Run and time a call."""
        began = time.process_time()
        result = call()
        self.note(name, time.process_time() - began)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Median, least and most."""
        return {
            name: {"median": statistics.median(found), "min": min(found), "max": max(found)}
            for name, found in self.samples.items()
        }


def layout_of(config: Path, profile: str, arena_gib: int) -> CacheLayout:
    """The layout of a real model in a large arena."""
    model = read_model(config, dtypes=CacheDtypes(kv="bfloat16"))
    return solve_layout(
        model.groups,
        arena_bytes=arena_gib << 30,
        profile=PROFILES[profile],
        hash_unit=model.spec.hash_unit,
        max_model_len=model.spec.max_model_len,
    )


def request_of(name: str, tokens: np.ndarray) -> Request:
    """A request for these tokens."""
    return Request(request_id=name, prompt_token_ids=tokens, params=SamplingParams(temperature=0))  # type: ignore[arg-type]


class Rig:
    """A manager, driven as the scheduler drives it."""

    def __init__(self, layout: CacheLayout, times: Times) -> None:
        self.cache = KVCacheManager(layout, max_num_seqs=ROWS)
        self.times, self.step = times, 0

    def prefill(self, request: Request, found: Any) -> float:
        """Admit and compute a prompt in chunks; returns the seconds of admission and allocation
        alone.
        """
        cache, spent, began = self.cache, 0.0, time.process_time()
        admission = cache.can_admit(request, found)
        assert isinstance(admission, Admission)
        cache.admit(admission)
        spent += time.process_time() - began
        while (start := cache.scheduled(request)) < request.num_tokens:
            stop = min(request.num_tokens, start + CHUNK)
            began = time.process_time()
            assert cache.extend(request, stop, self.step)
            spent += time.process_time() - began
            rows = np.array([cache.row(request)])
            cache.take_step(rows, np.array([start]), np.array([0, stop - start]))
            cache.commit(rows, np.array([stop]))
            cache.receive(self.step)
            self.step += 1
        return spent

    def decode(self, requests: list[Request], rows: np.ndarray, query_start: np.ndarray) -> float:
        """One token of every request; returns the manager's seconds."""
        for request in requests:
            request.append(7)
        cache, began = self.cache, time.process_time()
        start = cache.scheduled_tokens(rows)
        for index in np.flatnonzero(~cache.decode(rows, self.step)).tolist():
            assert cache.extend(requests[index], int(start[index]) + 1, self.step)
        cache.take_step(rows, start, query_start)
        cache.commit(rows, start + 1)
        cache.receive(self.step)
        self.step += 1
        return time.process_time() - began


def measure_decode(layout: CacheLayout, times: Times, *, windows: int, staggered: bool) -> None:
    """Steps of ``ROWS`` requests at growing context."""
    rig, name = Rig(layout, times), "staggered" if staggered else "aligned"
    requests = []
    for index in range(ROWS):
        tokens = np.arange(CONTEXT + (index % 128 if staggered else 0), dtype=np.int32) + 10_000 * (
            index + 1
        )
        requests.append(request_of(f"d{index}", tokens))
        rig.prefill(requests[-1], rig.cache.lookup(requests[-1]))
    rows, query_start = (
        np.array([rig.cache.row(request) for request in requests]),
        np.arange(ROWS + 1),
    )
    gc.collect()
    steps = [rig.decode(requests, rows, query_start) for _ in range(windows * WINDOW)]
    for index in range(windows):
        times.note(
            f"decode step, {name}", statistics.mean(steps[index * WINDOW : (index + 1) * WINDOW])
        )
    # Of every place in a window its best, where others use the machine and windows are interrupted.
    least = np.array(steps).reshape(windows, WINDOW).min(axis=0)
    times.note(f"decode step, {name}, undisturbed", float(least.mean()))
    times.note(f"decode step, {name}, p50", statistics.median(steps))
    times.note(f"decode step, {name}, worst", max(steps))
    for request in requests:
        times.timed(f"free after decoding, {name}", lambda request=request: rig.cache.free(request))  # type: ignore[misc]


def measure_prompts(layout: CacheLayout, times: Times, *, repeats: int) -> None:
    """Fresh prompts, and prompts that are cached whole."""
    rig = Rig(layout, times)
    for repeat in range(repeats + 1):
        request = request_of(
            f"f{repeat}", np.arange(PROMPT, dtype=np.int32) + 1_000_000 * (repeat + 1)
        )
        gc.collect()
        into = times if repeat else Times()
        began = time.process_time()
        rig.cache.keys(request, request.num_tokens)
        into.note("hash 32K", time.process_time() - began)
        found = into.timed(
            "lookup 32K, nothing cached", lambda request=request: rig.cache.lookup(request)
        )  # type: ignore[misc]
        looked = time.process_time() - began
        spent = rig.prefill(request, found)
        into.note("allocate 32K", spent)
        into.note("fresh 32K: hash + lookup + allocate", looked + spent)
        into.timed("free 32K", lambda request=request: rig.cache.free(request))  # type: ignore[misc]
    for size, label in ((PROMPT, "32K"), (4 * PROMPT, "128K")):
        if size <= layout.max_model_len:
            _measure_hits(rig, times, size=size, label=label, repeats=repeats)


def _measure_hits(rig: Rig, times: Times, *, size: int, label: str, repeats: int) -> None:
    tokens = np.arange(size - 16, dtype=np.int32) + 50_000_000
    first = request_of(f"first {label}", tokens)
    rig.prefill(first, rig.cache.lookup(first))
    rig.cache.free(first)
    for repeat in range(repeats + 1):
        into = times if repeat else Times()
        request = request_of(
            f"again {label} {repeat}", np.append(tokens, [1, 2, 3]).astype(np.int32)
        )
        rig.cache.keys(request, request.num_tokens)
        gc.collect()
        found = into.timed(
            f"lookup {label}, cached", lambda request=request: rig.cache.lookup(request)
        )  # type: ignore[misc]
        assert found.hit >= len(tokens) - 2 * rig.cache.layout.hash_unit, found.hit
        into.note(f"allocate after a hit of {label}", rig.prefill(request, found))
        into.timed(f"free {label} after a hit", lambda request=request: rig.cache.free(request))  # type: ignore[misc]


def measure_full(layout: CacheLayout, times: Times, *, repeats: int) -> None:
    """Fresh prompts on a cache that has to evict for them, and on the same one when it is empty."""
    rig, made = Rig(layout, times), 0

    def fresh(into: Times, name: str) -> None:
        """One prompt, from hashing to the last page; and everything, its publication and its end
        included.
        """
        nonlocal made
        made += 1
        request = request_of(f"x{made}", np.arange(PROMPT, dtype=np.int32) + PROMPT * made)
        gc.collect()
        began = time.process_time()
        rig.cache.keys(request, request.num_tokens)
        found = rig.cache.lookup(request)
        looked = time.process_time() - began
        into.note(name, looked + rig.prefill(request, found))
        rig.cache.free(request)
        into.note(name + WHOLE, time.process_time() - began)

    def evicted() -> int:
        return count_pages(rig.cache).evicted_nodes

    while not evicted():
        fresh(Times(), FULL)
    for repeat in range(repeats + 1):
        before = evicted()
        fresh(times if repeat else Times(), FULL)
        assert evicted() > before, "a full cache evicts for every prompt"
    for repeat in range(repeats + 1):
        rig.cache.clear_prefixes()
        before = evicted()
        fresh(times if repeat else Times(), EMPTY)
        assert evicted() == before


def table(results: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Calls by models: median [min..max], in microseconds."""
    made = Table(title="Manager: microseconds, median [min..max]", title_justify="left")
    made.add_column("call")
    for model in results:
        made.add_column(model, justify="right")
    made.add_column("target", justify="right")
    for call in dict.fromkeys(call for found in results.values() for call in found):
        cells = [_cell(found.get(call)) for found in results.values()]
        made.add_row(call, *cells, f"{TARGETS[call]:.0f}" if call in TARGETS else "")
    for what in ("", WHOLE):
        ratios = [
            found[FULL + what]["min"] / found[EMPTY + what]["min"] for found in results.values()
        ]
        cells = [f"{ratio:.2f}" for ratio in ratios]
        made.add_row(f"full / empty{what}, least of each", *cells, "" if what else f"{RATIO:.2f}")
    return made


def _cell(found: dict[str, float] | None) -> str:
    return (
        "-" if found is None else f"{found['median']:.0f} [{found['min']:.0f}..{found['max']:.0f}]"
    )


def main(
    configs: Annotated[Path, typer.Option(help="Directory of config files.")] = Path(
        "tests/data/configs"
    ),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Name of a config; default four layouts.", show_default=False),
    ] = None,
    profile: Annotated[str, typer.Option(help="Device profile: cpu or gpu.")] = "cpu",
    arena_gib: Annotated[
        int, typer.Option(help="Arena in GiB; only bookkeeping is allocated.")
    ] = 400,
    full_gib: Annotated[int, typer.Option(help="Arena that is filled, in GiB.")] = 20,
    windows: Annotated[int, typer.Option(help="Windows of 128 decode steps.")] = 5,
    repeats: Annotated[int, typer.Option(help="Repeats of everything else.")] = 7,
    out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.", show_default=False)
    ] = None,
) -> None:
    """Measure and print."""
    results = {}
    for name in model or MODELS:
        layout, times = layout_of(configs / f"{name}.json", profile, arena_gib), Times()
        measure_prompts(layout, times, repeats=repeats)
        full = layout_of(configs / f"{name}.json", profile, full_gib)
        measure_full(full, times, repeats=repeats)
        for staggered in (False, True):
            measure_decode(layout, times, windows=windows, staggered=staggered)
        results[name] = times.summary()
    Console(width=170).print(table(results))
    if out is not None:
        about = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "command": sys.argv,
            "profile": profile,
            "unit": "microseconds",
        }
        out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
