"""``octavo plan`` and ``octavo explain``: what a model's caches cost, from its config alone.

Owns the options and where output goes: tables or JSON to standard output, the page to a file.
Imports no torch.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.base import ConfigError

Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help="config.json files or model directories.")
]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens of one request. Default: the model's limit.", show_default=False),
]
Limit = Annotated[
    int | None, typer.Option(help="Plan as if the model went so far.", show_default=False)
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory for the cache of one device, such as 80GiB.", show_default=False),
]
Gpu = Annotated[
    str | None,
    typer.Option(help="A GPU's name, such as h200, instead of --memory.", show_default=False),
]
Tp = Annotated[
    int | None,
    typer.Option(help="Devices that share a model's heads. Default: all GPUs.", show_default=False),
]
KvDtype = Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")]
IndexerDtype = Annotated[
    str | None,
    typer.Option(
        help="Of index keys: as --kv-dtype, or fp4. Default: as --kv-dtype.", show_default=False
    ),
]
StateDtype = Annotated[str, typer.Option(help="Of recurrent states and compressors: fp32 or bf16.")]


def plan(
    models: Models,
    context: Context = None,
    max_model_len: Limit = None,
    memory: Memory = None,
    gpu: Gpu = None,
    count: Annotated[int, typer.Option(help="How many GPUs.")] = 1,
    tp: Tp = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Bytes of one copy, such as 70GiB. Default: from the config.", show_default=False
        ),
    ] = None,
    kv_dtype: KvDtype = "bf16",
    indexer_dtype: IndexerDtype = None,
    state_dtype: StateDtype = "fp32",
    profile: Annotated[
        str, typer.Option(help="Whose kernels decide block sizes: cpu or gpu.")
    ] = "gpu",
    requests: Annotated[int, typer.Option(help="Requests at once, for the longest context.")] = 1,
    lengths: Annotated[
        str | None,
        typer.Option(help="Lengths to show beside the context: 4096,32768.", show_default=False),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Distribution of lengths: 4096:70,131072:30.", show_default=False),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt computed in one step.")] = 8192,
    vs: Annotated[
        list[str] | None,
        typer.Option(help="Compare with uniform or vllm; may be repeated.", show_default=False),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row for every layer.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained page.", show_default=False)
    ] = None,
) -> None:
    """Plan memory before you deploy: what caches cost, what fits, and why."""
    from octavo.plan.planner import plan as make

    plans = [
        make(
            model,
            context=context,
            max_model_len=max_model_len,
            memory=memory,
            gpu=gpu,
            count=count,
            tp=tp,
            weights=weights,
            kv_dtype=kv_dtype,
            indexer_dtype=indexer_dtype,
            state_dtype=state_dtype,
            profile=profile,
            requests=requests,
            lengths=None
            if lengths is None
            else [_whole("lengths", item) for item in lengths.split(",")],
            mix=None if mix is None else _mix(mix),
            chunk=chunk,
            vs=vs or (),
        )
        for model in models
    ]
    if html is not None:
        from octavo.plan.html import page

        _write(html, page(plans))
    if json:
        values = [each.to_json() for each in plans]
        typer.echo(jsonlib.dumps(values[0] if len(values) == 1 else {"plans": values}))
    elif html is None:
        _print(plans, every_layer=layers)


def explain(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="config.json file or model directory.")
    ],
    context: Context = None,
    memory: Memory = None,
    kv_dtype: KvDtype = "bf16",
    indexer_dtype: IndexerDtype = None,
    state_dtype: StateDtype = "fp32",
) -> None:
    """Walk through a model's layers in plain words: what each remembers, for how long, and what
    that costs.
    """
    from octavo.plan.explain import walk
    from octavo.plan.planner import plan as make

    for model in models:
        made = make(
            model,
            context=context,
            memory=memory,
            kv_dtype=kv_dtype,
            indexer_dtype=indexer_dtype,
            state_dtype=state_dtype,
            vs=("uniform",),
        )
        typer.echo(walk(made))


def _print(plans: list[Any], *, every_layer: bool) -> None:
    from rich.console import Console

    from octavo.plan import render

    # What is piped is not cut to a terminal's width.
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    if len(plans) == 1:
        console.print(render.show(plans[0], every_layer=every_layer), highlight=False)
        return
    console.print(render.compare(plans), highlight=False)
    for each in plans:
        for line in render.comparisons(each):
            console.print(f"\n[bold]{each.model}[/]")
            console.print(line, highlight=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html {path} cannot be written: {error.strerror}") from error


def _whole(name: str, text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r} must be a whole number of at least 1")
    return int(text)


def _mix(text: str) -> dict[int, float]:
    shares = {}
    for item in text.split(","):
        length, colon, share = item.partition(":")
        try:
            shares[_whole("mix", length)] = float(share) if colon else 1.0
        except ValueError as error:
            raise ConfigError(f"mix: {item!r} must be LENGTH:SHARE, such as 4096:70") from error
    return shares
