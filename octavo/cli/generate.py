"""``octavo generate``: one prompt, streamed.

Owns what goes to standard output (the text, the report, or one JSON object) and what to standard
error (everything else). Imports torch through ``LLM``.
"""

from __future__ import annotations

import json as jsonlib
import sys
import time
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from octavo.cli import report as reports
from octavo.engine.live import Prompt
from octavo.engine.llm import LLM
from octavo.engine.outputs import RequestOutput
from octavo.plan.held import Held, held_by_kind
from octavo.sched.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate and how to show it."""

    model: str
    prompt: str
    params: SamplingParams
    chat: bool = False
    report: bool = False
    json: bool = False


def run(job: Job, **options: Any) -> None:
    """Load, generate, report. options: those of ``LLM``."""
    llm = load(job.model, **options)
    assert llm.tokenizer is not None, "loaded without skip_tokenizer_init"
    prompt: Prompt = job.prompt
    if job.chat:
        prompt = llm.tokenizer.chat([{"role": "user", "content": job.prompt}])
    if job.json:
        (output,) = llm.generate([prompt], job.params, progress=False)
        typer.echo(jsonlib.dumps(reports.as_json(output, by_kind(llm, output)), ensure_ascii=False))
        return
    output, _ = show(llm, prompt, job.params)
    if job.report:
        show_report(output)
        Console().print(reports.kinds_table(by_kind(llm, output)))


def load(model: str, **options: Any) -> LLM:
    """The model, with a bar on standard error while the weights are read. options: those of
    ``LLM``.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("Reading tokenizer and weights", total=None)
        return LLM(
            model,
            weight_progress=lambda done, total: bar.update(task, completed=done, total=total),
            **options,
        )


def show(
    llm: LLM, prompt: Prompt, params: SamplingParams, *, end: str = "\n"
) -> tuple[RequestOutput, float]:
    """Stream one continuation, then ``end``, to standard output; returns it and the seconds until
    its first token.
    """
    began, first, shown = time.perf_counter(), 0.0, 0
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params):
        first = first or time.perf_counter() - began
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write(end)
    assert output is not None, "every request yields at least its end"
    return output, first


def by_kind(llm: LLM, output: RequestOutput) -> tuple[Held, ...]:
    """What the cache held of a finished output, by kind of memory."""
    assert output.cache_report is not None, "a finished request was admitted"
    return held_by_kind(llm.built.spec, llm.built.layout, output.cache_report)


def show_report(output: RequestOutput) -> None:
    """The report of a finished output on standard output."""
    report = output.cache_report
    assert report is not None, "a finished request was admitted"
    console = Console()
    console.print()
    console.print(reports.table(report))
    console.print(
        reports.notes(report, len(output.prompt_token_ids)), highlight=False, soft_wrap=True
    )
