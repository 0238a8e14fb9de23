"""Prefill of recurrent layers on the CPU: our chunked functions beside Transformers' own torch
paths, in one run.

Owns sizes, random inputs and the tables. Times are medians of runs that alternate between the two,
so that a busy machine slows both. Only the recurrence is measured, from the same tensors: no
projection, convolution or norm. Memory is what a fresh process needs on top of its inputs and
outputs at its peak.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from octavo.ops.ragged import Ragged
from octavo.ops.torch.delta import gated_delta
from octavo.ops.torch.linear import decayed_attention, linear_recurrence
from octavo.ops.torch.ssm import selective, state_space_duality

TOKENS = 8192
LENGTHS = (2048, 4096, 8192, 16384, 32768)
MEMORY_LENGTHS = (2048, 32768)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recurrence: inputs of n tokens by name, our function of them, and Transformers' where it
    has one.
    """

    name: str
    inputs: Callable[[int], dict[str, Tensor]]
    ours: Callable[..., tuple[Tensor, Any]]
    theirs: Callable[..., Any] | None = None


def ragged(tokens: int) -> Ragged:
    """One request, whose state is wanted at its end."""
    return Ragged(starts=(0, tokens), emits=[(tokens,)])


def draw(seed: int) -> Callable[..., Tensor]:
    """Normal tensors of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def ssd_inputs(
    tokens: int, heads: int = 24, width: int = 64, state: int = 128
) -> dict[str, Tensor]:
    """Mamba-2 with one group."""
    normal = draw(0)
    return {
        "x": normal(tokens, heads, width),
        "dt": functional.softplus(normal(tokens, heads) - 2),
        "a": -normal(heads).exp(),
        "b": normal(tokens, 1, state),
        "c": normal(tokens, 1, state),
    }


def ssd_ours(x: Tensor, **rest: Tensor) -> tuple[Tensor, Any]:
    """From a zero state."""
    return state_space_duality(
        x, **rest, state=x.new_zeros(1, *x.shape[1:], rest["b"].shape[-1]), ragged=ragged(len(x))
    )


def ssd_theirs(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    """With the chunk size of their configs."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    return mamba2_chunk_scan(
        x[None], dt[None], a, b[None], c[None], chunk_size=256, return_final_states=True
    )


def delta_inputs(
    tokens: int, *channels: int, heads: int = 16, width: int = 128
) -> dict[str, Tensor]:
    """Keys and queries as the layers normalise them; ``channels`` more dimensions of the decay."""
    normal = draw(1)
    q, k = (functional.normalize(normal(tokens, heads, width), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": normal(tokens, heads, width),
        "log_decay": -functional.softplus(normal(tokens, heads, *channels) - 2),
        "beta": normal(tokens, heads).sigmoid(),
    }


def channel_inputs(tokens: int) -> dict[str, Tensor]:
    """With a decay per channel."""
    return delta_inputs(tokens, 128)


def delta_ours(q: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, Any]:
    """From a zero state."""
    state = v.new_zeros(1, v.shape[1], q.shape[2], v.shape[2])
    return gated_delta(q, v=v, **rest, state=state, ragged=ragged(len(q)))


def delta_theirs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Any:
    """Qwen3-Next's, which scales queries by itself."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(
        q[None] * q.shape[2] ** 0.5,
        k[None],
        v[None],
        log_decay[None],
        beta[None],
        output_final_state=True,
    )


def selective_inputs(tokens: int, width: int = 1536, state: int = 16) -> dict[str, Tensor]:
    """Mamba 130M."""
    normal = draw(2)
    return {
        "u": normal(tokens, width),
        "dt": functional.softplus(normal(tokens, width) - 3),
        "a": -normal(width, state).exp(),
        "b": normal(tokens, state),
        "c": normal(tokens, state),
    }


def selective_ours(u: Tensor, a: Tensor, **rest: Tensor) -> tuple[Tensor, Any]:
    """From a zero state."""
    return selective(u, a=a, **rest, state=u.new_zeros(1, *a.shape), ragged=ragged(len(u)))


def selective_theirs(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
    """Their loop over tokens."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    out, state = mamba_selective_scan(
        u.T[None], dt.T[None], a, b.T[None], c.T[None], return_last_state=True
    )
    return out.mT, state


def decayed_inputs(tokens: int, heads: int = 16, width: int = 128) -> dict[str, Tensor]:
    """Lightning attention."""
    normal = draw(3)
    q, k, v = (normal(tokens, heads, width) for _ in range(3))
    return {"q": q, "k": k, "v": v, "log_decay": -(2.0 ** -torch.linspace(0, 8, heads))}


def decayed_ours(q: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, Any]:
    """From a zero state."""
    state = v.new_zeros(1, v.shape[1], q.shape[2], v.shape[2])
    return decayed_attention(q, v=v, **rest, state=state, ragged=ragged(len(q)))


def recurrence_inputs(tokens: int, width: int = 2560) -> dict[str, Tensor]:
    """RG-LRU of RecurrentGemma 2B."""
    normal = draw(4)
    return {"a": normal(tokens, width).sigmoid(), "b": normal(tokens, width)}


def recurrence_ours(a: Tensor, b: Tensor) -> tuple[Tensor, Any]:
    """From a zero state."""
    return linear_recurrence(a, b, a.new_zeros(1, a.shape[1]), ragged(len(a)))


def recurrence_theirs(a: Tensor, b: Tensor) -> Any:
    """Their loop over tokens, which lives in a module but uses nothing of it."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    reset = torch.zeros(1, len(a), 1, dtype=torch.bool)
    return RecurrentGemmaRglru._rnn_scan(None, b[None], a[None], reset, None)


CASES = (
    Case(name="SSD", inputs=ssd_inputs, ours=ssd_ours, theirs=ssd_theirs),
    Case(name="gated delta", inputs=delta_inputs, ours=delta_ours, theirs=delta_theirs),
    Case(name="delta per channel", inputs=channel_inputs, ours=delta_ours),
    Case(
        name="selective scan", inputs=selective_inputs, ours=selective_ours, theirs=selective_theirs
    ),
    Case(name="decayed attention", inputs=decayed_inputs, ours=decayed_ours),
    Case(
        name="linear recurrence",
        inputs=recurrence_inputs,
        ours=recurrence_ours,
        theirs=recurrence_theirs,
    ),
)


def seconds(function: Callable[..., Any], inputs: dict[str, Tensor]) -> float:
    """One run."""
    begin = time.perf_counter()
    function(**inputs)
    return time.perf_counter() - begin


def compare(case: Case, tokens: int, runs: int) -> dict[str, float]:
    """Median seconds of both, and how far their outputs are apart."""
    assert case.theirs is not None
    inputs = case.inputs(tokens)
    ours, theirs = case.ours(**inputs)[0], case.theirs(**inputs)[0][0]
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    pairs = [(seconds(case.ours, inputs), seconds(case.theirs, inputs)) for _ in range(runs)]
    mine, others = (median(times) for times in zip(*pairs, strict=True))
    return {"ours_s": mine, "theirs_s": others, "ratio": mine / others, "difference": apart}


def resident(field: str) -> int:
    """Bytes of this process, as Linux counts them: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def working_bytes(name: str, tokens: int) -> int:
    """What a run needs at its peak beside inputs and outputs. Called in a process of its own."""
    torch.set_num_threads(1)
    case = next(c for c in CASES if c.name == name)
    case.ours(**case.inputs(128))
    inputs = case.inputs(tokens)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    out, _ = case.ours(**inputs)
    return resident("VmHWM") - before - out.nbytes


def measure_memory(name: str, lengths: Sequence[int]) -> dict[int, int]:
    """``working_bytes`` for every length, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return dict(
            zip(lengths, pool.map(working_bytes, [name] * len(lengths), lengths), strict=True)
        )


def measure(case: Case, runs: int) -> dict[str, Any]:
    """All numbers of one case."""
    found: dict[str, Any] = {"name": case.name}
    if case.theirs is not None:
        found |= compare(case, TOKENS, runs)
    inputs = {n: case.inputs(n) for n in LENGTHS}
    rounds = [[seconds(case.ours, inputs[n]) for n in LENGTHS] for _ in range(runs)]
    found["microseconds_per_token"] = {
        n: median(times) / n * 1e6
        for n, times in zip(LENGTHS, zip(*rounds, strict=True), strict=True)
    }
    found["working_bytes"] = measure_memory(case.name, MEMORY_LENGTHS)
    return found


def show(results: Sequence[dict[str, Any]]) -> Table:
    """One row per case."""
    table = Table(title=f"Prefill of {TOKENS} tokens, and longer")
    headings = ("recurrence", "ours s", "Transformers s", "ratio", "difference")
    for heading in (
        *headings,
        *(f"µs/token at {n}" for n in LENGTHS),
        *(f"MiB at {n}" for n in MEMORY_LENGTHS),
    ):
        table.add_column(heading, justify="right")
    for r in results:
        compared = (
            [
                f"{r['ours_s']:.3f}",
                f"{r['theirs_s']:.3f}",
                f"{r['ratio']:.2f}",
                f"{r['difference']:.0e}",
            ]
            if "ratio" in r
            else [""] * 4
        )
        times = [f"{t:.1f}" for t in r["microseconds_per_token"].values()]
        table.add_row(
            r["name"], *compared, *times, *(f"{b / 2**20:.0f}" for b in r["working_bytes"].values())
        )
    return table


def main(
    only: Annotated[str, typer.Option(help="Cases whose names contain this.")] = "",
    runs: Annotated[int, typer.Option(help="Runs of each, alternating.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers here.")
    ] = None,
) -> None:
    """Compare, and print a table."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        results = [measure(case, runs) for case in CASES if only in case.name]
    Console(width=200).print(show(results))
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    typer.run(main)
