"""How fast the compiled kernels read memory, beside a plain read of the same bytes and torch.

Owns the cases and the report. All contenders of a case run in turns, several rounds; a figure is
the median over rounds, and its spread the lowest and the highest. Shares are of the plain read in
the same round.

Run from the root of the repository: ``python -m benchmarks.kernels --json FILE``. Other work on the
machine makes the figures worthless; ``--busy`` measures one thread by its own CPU time, which still
tells ratios there.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from octavo.kernels.attention import ReadsStruct, paged_attention
from octavo.kernels.library import levels, library
from octavo.kernels.linear import linear
from octavo.runner.arena import memory

ROOT = Path(__file__).resolve().parents[1]
HEADS, KV_HEADS, DIM = 8, 2, 128
DECODES = ((8, 16384, 128), (8, 16384, 16), (32, 16384, 128), (32, 16384, 16))
"""(requests, tokens of each, tokens of a block)."""

ROWS = (1, 2, 4, 8, 16, 32)
WEIGHTS = (8192, 2048, 16)
"""(outputs, inputs, matrices), more bytes than caches hold."""

Contenders = Mapping[str, Callable[[], object]]


def rounds(
    contenders: Contenders, work: float, count: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """By name: work per second in billions (median, low, high over rounds) and the median share of
    the first contender's.
    """
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(count):
        for name, run in contenders.items():
            begin = clock()
            run()
            speeds[name].append(work / (clock() - begin) / 1e9)
    first = next(iter(speeds.values()))
    return {
        name: {
            "median": round(statistics.median(some), 2),
            "low": round(min(some), 2),
            "high": round(max(some), 2),
            "share": round(
                statistics.median(one / whole for one, whole in zip(some, first, strict=True)), 3
            ),
        }
        for name, some in speeds.items()
    }


def pages(requests: int, tokens: int, block: int) -> tuple[Tensor, Tensor, ReadsStruct]:
    """Keys and values [pages, heads, block, dim] in one buffer, page after page, and a step that
    decodes in all requests.
    """
    columns = tokens // block
    shape = requests * columns, 2, KV_HEADS, block, DIM
    data = memory(2 * prod(shape)).view(torch.bfloat16).view(shape)
    for part in data:
        part.normal_()
    drawn, last = np.random.default_rng(0).permutation(requests * columns), tokens - 1
    reads = ReadsStruct(
        table=drawn.astype(np.int32).reshape(requests, columns),
        rows=np.arange(requests),
        fixed=None,
        turning=0,
        block_tokens=block,
        start=np.full(requests, last),
        entry_start_loc=np.arange(requests + 1),
        query_start_loc=np.arange(requests + 1),
        positions=np.full(requests, last),
        fresh=np.zeros(requests, dtype=np.bool_),
        first=np.zeros(requests, dtype=np.int64),
        prefix=None,
    )
    return data[:, 0], data[:, 1], reads


def gathered(q: Tensor, keys: Tensor, values: Tensor, reads: ReadsStruct, scale: float) -> Tensor:
    """The same in torch: each head's pages are copied together and multiplied."""
    out, shared = torch.empty_like(q), HEADS // KV_HEADS
    for request, table in enumerate(torch.from_numpy(reads.table).long()):
        for head in range(KV_HEADS):
            mine = slice(head * shared, (head + 1) * shared)
            key, value = (
                one.select(1, head).index_select(0, table).flatten(0, 1) for one in (keys, values)
            )
            weights = torch.softmax((q[request, mine] @ key.T).float() * scale, dim=-1)
            out[request, mine] = weights.to(value.dtype) @ value
    return out


def decode_case(
    requests: int, tokens: int, block: int, count: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """GB/s on keys and values of one decode step."""
    keys, values, reads = pages(requests, tokens, block)
    q = torch.randn(requests, HEADS, DIM).bfloat16()
    own, scale = torch.zeros(requests, KV_HEADS, DIM, dtype=torch.bfloat16), DIM**-0.5
    whole = keys.untyped_storage()
    plain = torch.tensor([], dtype=torch.int64).set_(whole)  # type: ignore[call-overload]
    contenders: dict[str, Callable[[], object]] = {
        "read": plain.sum,
        "octavo": lambda: paged_attention(q, keys, values, own, own, reads, scale=scale),
        "torch": lambda: gathered(q, keys, values, reads, scale),
    }
    torch.testing.assert_close(contenders["octavo"](), contenders["torch"](), atol=2e-2, rtol=2e-2)
    return rounds(contenders, whole.nbytes(), count, clock)


def linear_case(rows: int, count: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """GB/s on bfloat16 weights of products with few rows."""
    outputs, inputs, matrices = WEIGHTS
    weights = torch.randn(matrices, outputs, inputs).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    contenders: Contenders = {
        "read": weights.view(torch.int64).sum,
        "octavo": lambda: [linear(x, weight) for weight in weights],
        "torch": lambda: [F.linear(x, weight) for weight in weights],
    }
    return rounds(contenders, weights.nbytes, count, clock)


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    kernels = library()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "isa": kernels.isa if kernels else None,
        "runs": levels(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def main(
    rounds_each: Annotated[int, typer.Option("--rounds", help="Rounds per case.")] = 7,
    small: Annotated[
        bool, typer.Option(help="Contexts and matrices an eighth as large, to see that it runs.")
    ] = False,
    busy: Annotated[bool, typer.Option(help="One thread, by its CPU time.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Measure, print and optionally write all cases."""
    assert library() is not None, "there are no compiled kernels to measure"
    found: dict[str, dict[str, dict[str, float]]] = {}
    clock = time.thread_time if busy else time.perf_counter
    if busy:
        torch.set_num_threads(1)
    with torch.inference_mode():
        for requests, tokens, block in DECODES:
            tokens = tokens // 8 if small else tokens
            found[f"decode {requests} x {tokens}, blocks of {block}"] = decode_case(
                requests, tokens, block, rounds_each, clock
            )
        for rows in ROWS:
            found[f"linear, {rows} rows"] = linear_case(rows, rounds_each, clock)
    report = {"machine": machine(), "unit": "GB/s", "rounds": rounds_each, "cases": found}
    table = Table("case", *("read", "octavo", "torch"), title="GB/s (share of the read)")
    for case, figures in found.items():
        cells = (figures.get(name) for name in ("read", "octavo", "torch"))
        table.add_row(
            case,
            *("–" if one is None else f"{one['median']} ({one['share']:.0%})" for one in cells),
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
