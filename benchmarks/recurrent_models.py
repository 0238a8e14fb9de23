"""Prefill of whole models with recurrent layers on the CPU: octavo beside Transformers' own torch
path, in one run.

Owns two mid-size random models (Mamba-2; Qwen3.5: three gated delta nets to one attention layer)
and the tables. Times are medians of runs that alternate between the two, float32 on both sides.
Memory is what a fresh process needs at its peak on top
of weights and cache: it is bounded by the chunk (``max_num_batched_tokens``), not by the prompt.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.recurrent import LENGTHS, TOKENS, resident
from octavo import LLM, SamplingParams
from octavo.cli.environment import environment

VOCAB = 8192
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mamba2": {
            "vocab_size": VOCAB,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "state_size": 128,
            "num_heads": 24,
            "head_dim": 64,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
        "qwen3_5_text": {
            "vocab_size": VOCAB,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 65536,
            "tie_word_embeddings": True,
        },
    }
)
MEMORY_LENGTHS = (4096, 32768)
CHUNK = 2048
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def make(name: str, directory: Path) -> Any:
    """The Transformers model, written below ``directory``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **MODELS[name]), dtype=torch.float32
    ).eval()
    model.save_pretrained(directory / name)
    return model


def load(directory: Path, name: str) -> LLM:
    """The same in octavo, each prompt computed anew."""
    return LLM(
        directory / name,
        dtype="float32",
        kv_memory="1GiB",
        max_model_len=LENGTHS[-1] + 64,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def prompt(tokens: int) -> list[int]:
    """Random ids."""
    return torch.randint(
        3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens)
    ).tolist()


def seconds(work: Callable[[], Any]) -> float:
    """One run."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(model: Any, llm: LLM, runs: int) -> dict[str, Any]:
    """Median seconds of both for one prompt, and whether the next token is the same."""
    ids = prompt(TOKENS)
    given = torch.tensor([ids])

    def theirs() -> int:
        return int(model(given, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    def ours() -> int:
        return llm.generate([ids], ONE, progress=False)[0].outputs[0].token_ids[0]

    equal = ours() == theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
    mine, others = (median(times) for times in zip(*pairs, strict=True))
    return {"ours_s": mine, "theirs_s": others, "ratio": mine / others, "same_token": equal}


def prefill(llm: LLM, tokens: int) -> float:
    """Seconds of one prompt."""
    ids = prompt(tokens)
    return seconds(lambda: llm.generate([ids], ONE, progress=False))


def working_bytes(directory: str, name: str, tokens: int) -> int:
    """What a prompt needs at its peak beside weights and cache. Called in a process of its own."""
    llm = load(Path(directory), name)
    llm.core._runner.arena.buffer.fill_(0)  # type: ignore[attr-defined]
    llm.generate([prompt(64)], ONE, progress=False)
    ids = prompt(tokens)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    llm.generate([ids], ONE, progress=False)
    return resident("VmHWM") - before


def measure(name: str, directory: Path, runs: int) -> dict[str, Any]:
    """All numbers of one model."""
    model = make(name, directory)
    llm = load(directory, name)
    found: dict[str, Any] = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    found |= compare(model, llm, runs)
    found["microseconds_per_token"] = {
        n: median(prefill(llm, n) for _ in range(runs)) / n * 1e6 for n in LENGTHS
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        count = len(MEMORY_LENGTHS)
        made = pool.map(working_bytes, [str(directory)] * count, [name] * count, MEMORY_LENGTHS)
        found["working_bytes"] = dict(zip(MEMORY_LENGTHS, made, strict=True))
    return found


def main(
    only: Annotated[str, typer.Option(help="Models whose names contain this.")] = "",
    runs: Annotated[int, typer.Option(help="Runs of each, alternating.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers here.")
    ] = None,
) -> None:
    """Compare, and print a table."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        results = [measure(name, Path(directory), runs) for name in MODELS if only in name]
    table = Table(title=f"Prefill of {TOKENS} tokens in chunks of {CHUNK}, and longer")
    headings = ("model", "parameters", "ours s", "Transformers s", "ratio", "same token")
    for heading in (
        *headings,
        *(f"µs/token at {n}" for n in LENGTHS),
        *(f"MiB at {n}" for n in MEMORY_LENGTHS),
    ):
        table.add_column(heading, justify="right")
    for r in results:
        times = [f"{t:.1f}" for t in r["microseconds_per_token"].values()]
        table.add_row(
            r["model"],
            f"{r['parameters']:,}",
            f"{r['ours_s']:.2f}",
            f"{r['theirs_s']:.2f}",
            f"{r['ratio']:.2f}",
            str(r["same_token"]),
            *times,
            *(f"{b / 2**20:.0f}" for b in r["working_bytes"].values()),
        )
    Console(width=200).print(table)
    if json_path is not None:
        json_path.write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2)
        )


if __name__ == "__main__":
    typer.run(main)
