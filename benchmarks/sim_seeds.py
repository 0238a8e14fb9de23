"""Ten thousand seeds of the simulator, on several processes, with progress.

Owns the loop and what it prints; every seed is one ``octavo.sim.world.run``. Failing seeds do not
stop it: they are listed at the end, each with the command that replays it, and make it exit with 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from octavo.sim import world


def simulate(seed: int, *, steps: int, model: str | None) -> dict[str, int] | str:
    """Counters of one seed, or how it failed."""
    try:
        report = world.run(seed=seed, steps=steps, config=model)
    except world.SimulationError as error:
        return str(error)
    return {
        name: value
        for name, value in asdict(report).items()
        if isinstance(value, int) and name != "seed"
    }


def main(
    count: Annotated[int, typer.Option(help="Seeds to run.")] = 10_000,
    first: Annotated[int, typer.Option(help="First seed.")] = 0,
    steps: Annotated[int, typer.Option(help="Ticks of trouble per seed.")] = world.DEFAULT_STEPS,
    model: Annotated[
        str | None,
        typer.Option(help="Toy model or path of a config.json; default: drawn from the seed."),
    ] = None,
    processes: Annotated[int, typer.Option(help="Worker processes.")] = 2,
) -> None:
    """Run seeds and print what they met."""
    one = partial(simulate, steps=steps, model=model)
    totals: Counter[str] = Counter()
    failures: list[str] = []
    with ProcessPoolExecutor(processes) as pool:
        results = pool.map(one, range(first, first + count), chunksize=16)
        for result in track(
            results, description="Simulating", total=count, console=Console(stderr=True)
        ):
            if isinstance(result, str):
                failures.append(result)
                print(result, file=sys.stderr, flush=True)
            else:
                totals.update(result)
    print(f"{count - len(failures):,} of {count:,} seeds clean")
    print(", ".join(f"{name} {value:,}" for name, value in totals.items()))
    for failure in failures:
        print(failure)
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
