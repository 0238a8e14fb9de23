"""Decoding and prefill of one model beside other engines, in one run: octavo and, where they are
installed, vLLM, Transformers and llama.cpp.

Owns the cases, the rounds and the table. Every engine lives in a process of its own
(`benchmarks.engines`), which is stopped while another one is measured; rounds go through the
engines in turn, so that a busy machine slows all of them. A sample is one
run: its prefill is the time until every request has a token, and its decoding the median of the
steps after that, which all requests make together. With each stands the share of the cores that
others had meanwhile. Prefix caches are off, prompts are random token ids, weights are bfloat16.

    python -m benchmarks.peers MODEL --from-gguf FILE.gguf --vllm VLLM_VENV/bin/python \\
        --llama XLLAMACPP_VENV/bin/python --llama-gguf BF16.gguf --rounds 3,transformers=1 --limit
        600 --json out.json

MODEL is a directory with safetensors. ``--from-gguf`` makes it, and the file of ``--llama-gguf``,
from one GGUF file where they do not exist. An engine that makes fewer rounds than the others, or
none, says so in the table and in the JSON, which is written again after every case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.others import Others

CASES: Sequence[tuple[int, int]] = ((1, 512), (8, 512), (32, 512), (1, 4096), (8, 4096), (1, 16384))
"""(requests, prompt tokens of each)."""

WARM_TOKENS = 32
"""Prompt tokens of each request in the run before a case, which is not counted."""

Found = dict[str, Any]
"""What an engine did in a case: rates and their spread, or ``skipped`` with the reason."""


class EngineError(RuntimeError):
    """An engine could not do what it was asked."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of an engine: seconds, and the share of all cores that others had meanwhile, None
    where that is not known.
    """

    prefill: float
    steps: Sequence[float]
    others: float | None

    def __str__(self) -> str:
        others = "" if self.others is None else f", others had {self.others:.0%} of the cores"
        return f"prefill {self.prefill:.2f} s, {1000 * median(self.steps):.1f} ms a step{others}"


class Worker:
    """One engine in a process: a line of JSON in, a line out; stopped unless it is at work."""

    def __init__(self, name: str, python: str, model: str, threads: int) -> None:
        self.name, began = name, time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            # Without this folder among the places that modules come from: its files have names that
            # others' packages have.
            [
                python,
                "-P",
                str(Path(__file__).with_name("engines.py").resolve()),
                name,
                model,
                str(threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        told = self._read()
        self.version, self.detail = str(told["version"]), str(told["detail"])
        self.ready = time.perf_counter() - began
        self.pace = 0.0
        """Most seconds a prompt token has taken."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """To the engine and all processes it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        for line in cast(IO[str], self._process.stdout):
            if line.startswith("{"):
                return cast(dict[str, Any], json.loads(line))
        self._log.seek(0)
        last = "".join(self._log.readlines()[-5:]).strip()
        raise EngineError(f"{self.name} ended with {self._process.wait()}: {last}")

    def run(self, requests: int, tokens: int, steps: int, seed: int) -> Sample:
        """One sample. Raises EngineError."""
        others = Others(self._process.pid)
        self._signal(signal.SIGCONT)
        try:
            stdin = cast(IO[str], self._process.stdin)
            stdin.write(
                json.dumps({"requests": requests, "tokens": tokens, "steps": steps, "seed": seed})
                + "\n"
            )
            stdin.flush()
            answer = self._read()
        except BrokenPipeError:
            answer = self._read()
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise EngineError(answer["error"])
        return Sample(prefill=answer["prefill"], steps=answer["steps"], others=others.share())

    def close(self) -> None:
        """End the process and all it has started."""
        self._signal(signal.SIGCONT)
        try:
            cast(IO[str], self._process.stdin).close()
            self._process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._signal(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """rounds: counted ones by engine. steps: of decoding in each. limit: seconds for an engine and
    a case; 0 is no limit.
    """

    rounds: Mapping[str, int]
    steps: int
    limit: float


def measure(
    workers: Sequence[Worker], case: tuple[int, int], plan: Plan, note: Console
) -> dict[str, Found]:
    """One case in rounds, the engines in turn; by engine what it did."""
    requests, tokens = case
    label = f"{requests} x {tokens}"
    skipped: dict[str, str] = {}
    samples: dict[str, list[Sample]] = {worker.name: [] for worker in workers}
    spent = dict.fromkeys(samples, 0.0)
    for worker in workers:
        expected = requests * tokens * worker.pace
        if plan.limit and expected > plan.limit:
            skipped[worker.name] = f"about {expected:.0f} s, more than the limit"
    for number in range(max(plan.rounds.values()) + 1):
        for worker in workers:
            name, done = worker.name, len(samples[worker.name])
            late = done and plan.limit and spent[name] * (done + 1) / done > plan.limit
            if name in skipped or number > plan.rounds[name] or late:
                continue
            try:
                if not number:
                    note.print(
                        f"{label}: {name} warms up", highlight=False, markup=False, soft_wrap=True
                    )
                    worker.run(requests, WARM_TOKENS, 4, 1000)
                    continue
                began = time.perf_counter()
                sample = worker.run(requests, tokens, plan.steps, number)
            except EngineError as error:
                skipped[name] = str(error)
                note.print(
                    f"{label}: {name} failed: {error}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
                continue
            spent[name] += time.perf_counter() - began
            samples[name].append(sample)
            worker.pace = max(worker.pace, sample.prefill / (requests * tokens))
            note.print(
                f"{label}: {name} round {number}: {sample}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    return {
        worker.name: summary(
            requests,
            tokens,
            samples[worker.name],
            skipped.get(worker.name, ""),
            plan.rounds[worker.name],
        )
        for worker in workers
    }


def summary(
    requests: int, tokens: int, samples: Sequence[Sample], skipped: str, wanted: int
) -> Found:
    """Medians of the rounds, and the lowest and highest of them; a round's decoding is the median
    of its steps.
    """
    if not samples:
        return {"skipped": skipped or "no round was asked for"}
    prefill = [requests * tokens / sample.prefill for sample in samples]
    decode = [requests / median(sample.steps) for sample in samples]
    return {
        "rounds": len(samples),
        "rounds_wanted": wanted,
        **({"failed": skipped} if skipped else {}),
        "prefill_tokens_per_s": median(prefill),
        "prefill_spread": [min(prefill), max(prefill)],
        "decode_tokens_per_s": median(decode),
        "decode_spread": [min(decode), max(decode)],
        "prefill_s": [sample.prefill for sample in samples],
        "step_s": [list(sample.steps) for sample in samples],
        "others_share": [sample.others for sample in samples],
    }


def tabulate(
    workers: Sequence[Worker], results: Mapping[tuple[int, int], Mapping[str, Found]]
) -> Table:
    """A row per case and kind of rate, a column per engine, and how many times the others octavo
    is.
    """
    table = Table(title="tokens per second, medians; (n) is of so few rounds")
    others = [worker.name for worker in workers if worker.name != "octavo"]
    headings = [f"{worker.name} {worker.version}" for worker in workers]
    for heading in ("case", *headings, *(f"octavo / {name}" for name in others)):
        table.add_column(heading, justify="right")
    for (requests, tokens), found in results.items():
        for kind in ("decode", "prefill"):
            rates = {name: part.get(f"{kind}_tokens_per_s") for name, part in found.items()}
            ours = rates["octavo"]
            ratios = [
                f"{ours / rate:.2f}" if ours and (rate := rates[name]) else "–" for name in others
            ]
            cells = [_cell(found[worker.name], rates[worker.name]) for worker in workers]
            table.add_row(f"{kind} {requests} x {tokens}", *cells, *ratios)
    ready = {worker.name: worker.ready for worker in workers}
    faster = [f"{ready[name] / ready['octavo']:.1f}" for name in others]
    table.add_row("start, s", *(f"{seconds:.1f}" for seconds in ready.values()), *faster)
    return table


def _cell(found: Found, rate: float | None) -> str:
    if rate is None:
        return f"skipped: {found['skipped']}"
    few = f" ({found['rounds']})" if found["rounds"] < found["rounds_wanted"] else ""
    return (f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}") + few


def read_rounds(text: str, names: Sequence[str]) -> dict[str, int]:
    """``3,vllm=1`` as rounds by engine. Raises typer.BadParameter."""
    given = dict.fromkeys(names, 3)
    try:
        for part in text.split(","):
            name, _, number = part.rpartition("=")
            given.update({name: int(number)} if name else dict.fromkeys(names, int(number)))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a number of rounds such as 3 or 3,vllm=1", param_hint="--rounds"
        ) from error
    if unknown := set(given) - set(names):
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: engines are {', '.join(names)}", param_hint="--rounds"
        )
    return given


def read_cases(text: str) -> list[tuple[int, int]]:
    """``8x512,1x4096`` as cases; all of them for nothing. Raises typer.BadParameter."""
    named = {f"{requests}x{tokens}": (requests, tokens) for requests, tokens in CASES}
    wanted = text.split(",") if text else list(named)
    if unknown := [case for case in wanted if case not in named]:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: cases are {', '.join(named)}", param_hint="--only"
        )
    return [named[case] for case in wanted]


def report(
    path: Path,
    workers: Sequence[Worker],
    plan: Plan,
    results: Mapping[tuple[int, int], Mapping[str, Found]],
) -> None:
    """All numbers as JSON."""
    from octavo.cli.environment import environment

    made = {
        "environment": environment(),
        "command": " ".join(sys.argv),
        "steps": plan.steps,
        "limit_s": plan.limit,
        "engines": {
            w.name: {"version": w.version, "detail": w.detail, "ready_s": w.ready} for w in workers
        },
        "cases": {f"{requests}x{tokens}": found for (requests, tokens), found in results.items()},
    }
    path.write_text(json.dumps(made, indent=1), encoding="utf-8")


def prepare(gguf: Path | None, model: Path, llama_gguf: Path | None) -> None:
    """Make what does not exist yet of the two forms of the model."""
    from benchmarks import peer_models

    if gguf is not None and not (model / "config.json").is_file():
        peer_models.to_safetensors(gguf, model)
    if gguf is not None and llama_gguf is not None and not llama_gguf.is_file():
        peer_models.to_bf16_gguf(gguf, llama_gguf)


def main(
    model: Annotated[Path, typer.Argument(help="Directory with safetensors.")],
    vllm: Annotated[
        str | None, typer.Option(help="Python of an environment with vLLM; measures it.")
    ] = None,
    llama: Annotated[
        str | None,
        typer.Option(help="Python of an environment with xllamacpp; measures llama.cpp."),
    ] = None,
    llama_gguf: Annotated[
        Path | None, typer.Option(help="The same model in bfloat16 for llama.cpp.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Measure Transformers too.")] = True,
    only: Annotated[
        str, typer.Option(help="Cases such as 8x512, separated by commas; all by default.")
    ] = "",
    rounds: Annotated[
        str, typer.Option(help="Counted rounds; 3,vllm=1 for another number in one engine.")
    ] = "3",
    steps: Annotated[int, typer.Option(help="Decoding steps of a sample.", min=1)] = 32,
    limit: Annotated[
        float,
        typer.Option(
            help=(
                "Seconds an engine may spend on a case, as far as earlier ones tell; 0 for no"
                " limit."
            ),
            min=0,
        ),
    ] = 0,
    threads: Annotated[int, typer.Option(help="Threads of every engine.", min=1)] = 2,
    gguf: Annotated[
        Path | None,
        typer.Option("--from-gguf", help="Make MODEL and --llama-gguf from this file first."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers here, after every case.")
    ] = None,
) -> None:
    """Measure and print a table; progress goes to standard error."""
    if llama is not None and llama_gguf is None:
        raise typer.BadParameter("--llama needs --llama-gguf", param_hint="--llama")
    engines = {"octavo": (sys.executable, str(model))}
    engines |= {"vllm": (vllm, str(model))} if vllm else {}
    engines |= {"transformers": (sys.executable, str(model))} if transformers else {}
    engines |= {"llama.cpp": (llama, str(llama_gguf))} if llama else {}
    plan = Plan(rounds=read_rounds(rounds, list(engines)), steps=steps, limit=limit)
    cases = read_cases(only)
    # Ended from outside, workers that are stopped must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    prepare(gguf, model, llama_gguf)
    note = Console(stderr=True)
    workers: list[Worker] = []
    results: dict[tuple[int, int], dict[str, Found]] = {}
    try:
        for name, (python, source) in engines.items():
            workers.append(Worker(name, python, source, threads))
            note.print(
                f"{name} {workers[-1].version} after {workers[-1].ready:.1f} s:"
                f" {workers[-1].detail}",
                highlight=False,
                soft_wrap=True,
            )
        for case in cases:
            results[case] = measure(workers, case, plan, note)
            if json_path is not None:
                report(json_path, workers, plan, results)
        Console(width=max(160, note.width)).print(tabulate(workers, results))
    except EngineError as error:
        note.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    typer.run(main)
