"""``octavo sim``: seeds of the simulator, one after another or on several processes.

Owns how results are shown. Imports no torch.
"""

from __future__ import annotations

import json as jsonlib
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial

import typer
from rich.console import Console
from rich.progress import track

from octavo.sim import world


def run(*, first: int, count: int, steps: int | None, model: str | None, json: bool) -> None:
    """Run ``count`` seeds from ``first`` on. Exits with 1 and the replay command at the first that
    fails.
    """
    one = partial(simulate, steps=steps or world.DEFAULT_STEPS, model=model)
    reports: list[world.SimReport] = []
    try:
        shown = track(
            _all(one, range(first, first + count)),
            description="Simulating",
            total=count,
            console=Console(stderr=True),
            transient=True,
            disable=json or count == 1,
        )
        reports.extend(shown)
    except world.SimulationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if json:
        typer.echo(jsonlib.dumps([asdict(report) for report in reports]))
    elif count == 1:
        typer.echo(" ".join(f"{name}={value}" for name, value in asdict(reports[0]).items()))
    else:
        _summary(reports)


def simulate(seed: int, *, steps: int, model: str | None) -> world.SimReport:
    """One seed; at module level so that other processes can be told to run it."""
    return world.run(seed=seed, steps=steps, config=model)


def _all(one: partial[world.SimReport], seeds: range) -> Iterator[world.SimReport]:
    workers = min(os.cpu_count() or 1, len(seeds) // 8)
    if workers < 2:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(workers) as pool:
        try:
            yield from pool.map(one, seeds, chunksize=8)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _summary(reports: list[world.SimReport]) -> None:
    totals: Counter[str] = Counter()
    for report in reports:
        totals.update(
            {
                name: value
                for name, value in asdict(report).items()
                if isinstance(value, int) and name != "seed"
            }
        )
    typer.echo(
        f"{len(reports)} seeds clean: "
        + ", ".join(f"{value:,} {name}" for name, value in totals.items())
    )
