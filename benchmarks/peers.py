"""Decoding and prefill of one model beside other engines, in one run: octavo, Transformers and, where it is installed, vLLM.

Owns the cases, the workers and the table. Every engine lives in a process of its own, which waits while another one is
measured; rounds go through the engines in turn, so that a busy machine slows all of them. Prefix caches are off, prompts are
random token ids, all in bfloat16.

    python -m benchmarks.peers MODEL --vllm /path/to/venv/bin/python --json out.json

MODEL is a directory with safetensors; ``--from-gguf FILE`` makes it from a GGUF file first, through Transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

CASES: Sequence[tuple[int, int]] = ((1, 512), (8, 512), (32, 512), (1, 4096), (8, 4096), (1, 16384))
"""(requests, prompt tokens of each)."""

STEPS = 24
"""Tokens that are decoded and timed."""

MAX_LEN = 16384 + 64


class Worker:
    """One engine in a process: a line of JSON in, a line out."""

    def __init__(self, name: str, python: str, model: str) -> None:
        self.name, began = name, time.perf_counter()
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            # Without this folder among the places that modules come from: its files have names that others' packages have.
            [python, "-P", str(Path(__file__).resolve()), "--worker", name, model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.version = str(self._read()["version"])
        self.ready = time.perf_counter() - began

    def _read(self) -> dict[str, Any]:
        for line in cast(IO[str], self._process.stdout):
            if line.startswith("{"):
                return cast(dict[str, Any], json.loads(line))
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}")

    def run(self, requests: int, tokens: int, steps: int, seed: int) -> float:
        """Seconds for ``requests`` prompts and ``steps`` tokens of each."""
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(json.dumps({"requests": requests, "tokens": tokens, "steps": steps, "seed": seed}) + "\n")
        stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End the process."""
        cast(IO[str], self._process.stdin).close()
        self._process.wait(60)


def prompts(requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Random ids, the same in every engine."""
    import random

    rng = random.Random(seed)
    return [[rng.randrange(100, 30000) for _ in range(tokens)] for _ in range(requests)]


def octavo_worker(model: str) -> tuple[str, Any]:
    """Our own engine."""
    import octavo

    llm = octavo.LLM(
        model, dtype="bfloat16", kv_memory="4GiB", max_model_len=MAX_LEN, enable_prefix_caching=False, skip_tokenizer_init=True
    )

    def run(given: list[list[int]], steps: int) -> None:
        llm.generate(given, octavo.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True), progress=False)

    return octavo.__version__, run


def vllm_worker(model: str) -> tuple[str, Any]:
    """vLLM's CPU backend with its defaults."""
    import vllm

    llm = vllm.LLM(model, dtype="bfloat16", max_model_len=MAX_LEN, enable_prefix_caching=False, skip_tokenizer_init=True)

    def run(given: list[list[int]], steps: int) -> None:
        params = vllm.SamplingParams(temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)

    return vllm.__version__, run


def transformers_worker(model: str) -> tuple[str, Any]:
    """Transformers' generate with its dynamic cache."""
    import torch
    import transformers

    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(given: list[list[int]], steps: int) -> None:
        ids = torch.tensor(given)
        options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
        net.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return transformers.__version__, run


WORKERS = {"octavo": octavo_worker, "vllm": vllm_worker, "transformers": transformers_worker}


def work(name: str, model: str) -> None:
    """The worker's side: one line for every line."""
    version, run = WORKERS[name](model)
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        given = prompts(case["requests"], case["tokens"], case["seed"])
        began = time.perf_counter()
        run(given, case["steps"])
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def measure(workers: Sequence[Worker], case: tuple[int, int], rounds: int) -> dict[str, dict[str, Any]]:
    """By engine: prefill and decode rates in tokens per second; medians of ``rounds`` behind one that is not counted."""
    requests, tokens = case
    times: dict[str, list[tuple[float, float]]] = {worker.name: [] for worker in workers}
    for number in range(rounds + 1):
        for worker in workers:
            first = worker.run(requests, tokens, 1, 2 * number)
            whole = worker.run(requests, tokens, 1 + STEPS, 2 * number + 1)
            if number:
                times[worker.name].append((first, whole))
    found = {}
    for name, pairs in times.items():
        prefill = [requests * tokens / first for first, _ in pairs]
        decode = [requests * STEPS / max(1e-9, whole - first) for first, whole in pairs]
        found[name] = {
            "prefill_tokens_per_s": median(prefill), "prefill_spread": [min(prefill), max(prefill)],
            "decode_tokens_per_s": median(decode), "decode_spread": [min(decode), max(decode)],
        }  # fmt: skip
    return found


def from_gguf(file: Path, directory: Path) -> None:
    """The model of a GGUF file as bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # What was read from GGUF cannot be saved as it is; a model made of its config can.
    clean = type(read)(read.config).to(torch.bfloat16)
    clean.load_state_dict(read.state_dict())
    # The weights are not quantised any more.
    clean.config.__dict__.pop("quantization_config", None)
    clean.save_pretrained(directory)


def tabulate(workers: Sequence[Worker], results: Mapping[tuple[int, int], dict[str, dict[str, Any]]]) -> Table:
    """A row per case and kind of rate, a column per engine, and how many times the others octavo is."""
    table = Table(title="tokens per second, medians")
    others = [worker.name for worker in workers if worker.name != "octavo"]
    for heading in ("case", *(worker.name for worker in workers), *(f"octavo / {name}" for name in others)):
        table.add_column(heading, justify="right")
    for (requests, tokens), found in results.items():
        for kind in ("decode", "prefill"):
            rates = {name: part[f"{kind}_tokens_per_s"] for name, part in found.items()}
            ratios = [f"{rates['octavo'] / rates[name]:.2f}" for name in others]
            table.add_row(f"{kind} {requests} x {tokens}", *(f"{rates[w.name]:,.0f}" for w in workers), *ratios)
    ready = {worker.name: worker.ready for worker in workers}
    faster = [f"{ready[name] / ready['octavo']:.1f}" for name in others]
    table.add_row("start, s", *(f"{seconds:.1f}" for seconds in ready.values()), *faster)
    return table


def main(
    model: Annotated[Path, typer.Argument(help="Directory with safetensors.")],
    vllm: Annotated[str | None, typer.Option(help="Python of an environment with vLLM.")] = None,
    transformers: Annotated[bool, typer.Option(help="Measure Transformers too.")] = True,
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 3,
    only: Annotated[str, typer.Option(help="Cases such as 8x512, separated by commas.")] = "",
    gguf: Annotated[Path | None, typer.Option("--from-gguf", help="Make MODEL from this file first.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
) -> None:
    """Measure and print a table."""
    from octavo.cli.environment import environment

    if gguf is not None and not (model / "config.json").is_file():
        from_gguf(gguf, model)
    workers = [Worker("octavo", sys.executable, str(model))]
    workers += [Worker("transformers", sys.executable, str(model))] if transformers else []
    workers += [Worker("vllm", vllm, str(model))] if vllm else []
    wanted = [tuple(int(part) for part in case.split("x")) for case in only.split(",")] if only else list(CASES)
    results: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for case in CASES:
        if case in wanted:
            results[case] = measure(workers, case, rounds)
            Console(stderr=True).print(case, {n: round(v["decode_tokens_per_s"]) for n, v in results[case].items()})
    Console(width=160).print(tabulate(workers, results))
    if json_path is not None:
        made = {
            "environment": environment(), "command": " ".join(sys.argv),
            "engines": {worker.name: {"version": worker.version, "ready_s": worker.ready} for worker in workers},
            "cases": {f"{requests}x{tokens}": found for (requests, tokens), found in results.items()},
        }  # fmt: skip
        json_path.write_text(json.dumps(made, indent=1))
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:4])
    else:
        typer.run(main)
