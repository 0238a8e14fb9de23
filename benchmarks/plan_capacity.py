"""Planned, held and ideal numbers of requests, for every config of a directory, beside vLLM's
rules.

Owns the matrix and what it prints. Held is what the real cache manager admits, one request after
another, in chunks of 8,192 tokens and with all earlier ones decoding (``octavo.plan.admission``).
Exits with 1 where a plan is not what is held, or falls short of the ideal by more than 2 % where
that is 50 or more (4 % for compressed entries at 4,096 tokens), or by more than one request
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import floor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from octavo.base import UnsupportedError
from octavo.cache.layout import GPU, solve_layout
from octavo.config import format_size, parse_size
from octavo.plan import capacity, vllm
from octavo.plan.admission import admit_until_refused
from octavo.plan.planner import LENGTHS, read_model
from octavo.spec.stream import CacheDtypes, full_dtype


@dataclass(frozen=True, kw_only=True)
class Case:
    """One config at one length."""

    path: Path
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of one case. held: None where nothing was admitted, only planned. seconds: of
    admitting.
    """

    model: str
    tokens: int
    planned: int
    held: int | None
    ideal: float
    compressed: bool
    vllm_planned: float | None
    vllm_resident: int | None
    seconds: float

    @property
    def good(self) -> bool:
        """Is the plan what is held, and near enough to the ideal?"""
        least = floor(self.ideal) - 1
        if self.ideal >= 50:
            least = floor(self.ideal) * (0.96 if self.compressed and self.tokens <= 4096 else 0.98)
        return self.planned >= least and self.held in (None, self.planned)


def run(
    case: Case, *, memory: int, dtypes: CacheDtypes, off: int, admit: bool, caching: bool
) -> Result | str | None:
    """One case; None where the model does not go so far, text where it cannot be read."""
    try:
        model = read_model(case.path, dtypes=dtypes)
    except UnsupportedError as error:
        return f"{case.path.name}: {error}"
    if case.tokens > model.spec.max_model_len:
        return None
    tokens, limit = case.tokens - off, model.spec.max_model_len
    layout = solve_layout(
        model.groups,
        arena_bytes=memory,
        profile=GPU,
        hash_unit=model.spec.hash_unit,
        max_model_len=limit,
    )
    began = time.perf_counter()
    held = (
        admit_until_refused(layout, tokens, chunk=8192, caching=caching).requests if admit else None
    )
    peer = vllm.compare(model, tokens, memory=memory)
    fit = capacity.capacity_at(layout, tokens, memory=memory, replicas=1)
    return Result(
        model=model.name,
        tokens=tokens,
        planned=fit.requests,
        held=held,
        ideal=fit.ideal,
        compressed=any(
            member.stream.stride > 1 for group in model.groups for member in group.members
        ),
        vllm_planned=None if peer.reason else peer.planned,
        vllm_resident=None if peer.reason else peer.resident,
        seconds=time.perf_counter() - began,
    )


def table(results: list[Result], memory: int) -> Table:
    """All results, one row each."""
    made = Table(title=f"Requests in {format_size(memory)}", title_justify="left")
    for name in (
        "model",
        "tokens",
        "ideal",
        "planned",
        "held",
        "of the ideal",
        "vLLM holds",
        "vLLM plans",
        "seconds",
        "",
    ):
        made.add_column(name, justify="left" if name in ("model", "") else "right")
    for each in results:
        made.add_row(
            each.model,
            f"{each.tokens:,}",
            f"{each.ideal:,.2f}",
            f"{each.planned:,}",
            _or_dash(each.held, ",d"),
            f"{each.planned / each.ideal:.1%}",
            _or_dash(each.vllm_resident, ",d"),
            _or_dash(each.vllm_planned, ",.2f"),
            f"{each.seconds:.1f}",
            "" if each.good else "BAD",
        )
    return made


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(
    configs: Annotated[Path, typer.Argument(help="Directory of config files.")],
    memory: Annotated[str, typer.Option(help="Cache memory.")] = "80GiB",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Lengths; default 4096 to 1048576.", show_default=False)
    ] = None,
    off: Annotated[
        int, typer.Option(help="Tokens less than each length, so that no block is full.")
    ] = 37,
    kv_dtype: Annotated[str, typer.Option(help="Of keys and values.")] = "bf16",
    indexer_dtype: Annotated[
        str | None, typer.Option(help="Of index keys.", show_default=False)
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="Of states.")] = "fp32",
    only: Annotated[str, typer.Option(help="Part of the config's name.")] = "",
    admit: Annotated[bool, typer.Option(help="Admit requests, instead of planning only.")] = True,
    caching: Annotated[
        bool, typer.Option(help="Publish prefixes while admitting; slower.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Worker processes.")] = 2,
) -> None:
    """Run the matrix and print it."""
    size, indexer = (
        parse_size(memory, "memory"),
        full_dtype(indexer_dtype) if indexer_dtype else None,
    )
    dtypes = CacheDtypes(kv=full_dtype(kv_dtype), indexer=indexer, state=full_dtype(state_dtype))
    cases = [Case(path=path, tokens=n) for path in _files(configs, only) for n in tokens or LENGTHS]
    one = partial(run, memory=size, dtypes=dtypes, off=off, admit=admit, caching=caching)
    with ProcessPoolExecutor(processes) as pool:
        progress = track(
            pool.map(one, cases),
            total=len(cases),
            description="Admitting",
            console=Console(stderr=True),
        )
        found = [result for result in progress if result is not None]
    results = [result for result in found if isinstance(result, Result)]
    Console(width=150).print(table(results, size))
    for refused in dict.fromkeys(result for result in found if isinstance(result, str)):
        print(refused)
    bad = sum(not result.good for result in results)
    print(f"{len(results)} cases, {bad} bad")
    raise typer.Exit(1 if bad else 0)


def _files(configs: Path, only: str) -> Iterator[Path]:
    for path in sorted(configs.glob("*.json")):
        if only in path.name and path.name.islower():
            yield path


if __name__ == "__main__":
    typer.run(main)
