"""``octavo sim``: seeds of the simulator, one after another or on several processes; and what an
engine recorded before its scheduler broke.

Owns how results are shown. Imports no torch.
"""

from __future__ import annotations

import json as jsonlib
import os
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import track

from octavo.sim import replay as replays
from octavo.sim import world
from octavo.spec.hf import find_families


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


def replay(path: Path, *, check: bool, plugins: Sequence[str], json: bool) -> None:
    """Ask a new scheduler what the dump's was asked. Exits with 1 and the traceback where it breaks
    as well.
    """
    find_families(tuple(plugins))
    record = replays.read(path)
    err = Console(stderr=True, soft_wrap=True, highlight=False)
    with err.status("Replaying") if err.is_terminal else nullcontext():
        found = replays.replay(record, check=check)
    recorded, error = record.failure, found.error
    where = list(recorded.where[-1:]) or ["an unknown place"]
    if json:
        said = {
            "octavo": record.octavo,
            "recorded": {"type": recorded.type, "where": recorded.where},
            "complete": record.complete,
            "calls": len(record.calls.split()),
            "made": found.calls,
            "raised": None
            if error is None
            else {"type": type(error).__name__, "message": str(error)},
        }
        typer.echo(jsonlib.dumps(said))
        raise typer.Exit(int(error is not None))
    typer.echo(
        f"recorded by octavo {record.octavo}: {recorded.type} at {where[0]}, after"
        f" {len(record.calls.split()):,} calls about {len(record.requests):,} requests"
    )
    if not record.complete:
        typer.echo(
            f"The record is cut: {record.missing:,} earlier calls are missing, and it begins on an"
            " empty cache. What depends on them does not show."
        )
    if error is None:
        typer.echo(f"Nothing was raised in {found.calls:,} calls.")
        return
    typer.echo(f"Call {found.calls:,} raised:", err=True)
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    raise typer.Exit(1)


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
