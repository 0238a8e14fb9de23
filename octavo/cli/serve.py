"""``octavo serve``: a model behind HTTP.

Owns the options of a server process, and what it says when it is ready. Imports torch through
``AsyncLLM``.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from octavo.base import ConfigError
from octavo.cli import generate
from octavo.config import format_size, parse_size
from octavo.engine.aio import AsyncLLM
from octavo.engine.llm import LLM
from octavo.observe.metrics import Metrics
from octavo.server.answers.formats import format_of
from octavo.server.app import create_app
from octavo.server.run import Server, bind, listen, url


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the server; those of the engine are passed on."""

    host: str
    port: int
    api_key: str | None
    served_model_name: str | None
    chat_template: Path | None
    answer_format: str
    max_waiting: int
    max_body: str
    shutdown_timeout: float


def run(model: str, options: Options, **engine_options: Any) -> None:
    """Take the port, load the model, then listen: until then connections are refused, so that
    nobody waits for weights.
    """
    max_body = parse_size(options.max_body, "max_body")
    template = None if options.chat_template is None else _read(options.chat_template)
    format_of(None, None, options.answer_format)
    taken = bind(options.host, options.port)
    metrics = Metrics()
    llm = generate.load(model, **engine_options)
    name = options.served_model_name or Path(model).name.removesuffix(".gguf") or model
    engine = AsyncLLM(llm, max_waiting=options.max_waiting, recorder=metrics, model_name=name)
    if template is not None:
        assert engine.tokenizer is not None, "loaded without skip_tokenizer_init"
        engine.tokenizer.backend.chat_template = template
    app = create_app(
        engine,
        model_name=name,
        api_key=options.api_key,
        max_body_bytes=max_body,
        metrics=metrics,
        shutdown_timeout=options.shutdown_timeout,
        answer_format=options.answer_format,
    )

    def ready() -> None:
        typer.echo(f"octavo serves {name} at {url(taken)}/v1 and shows its cache at {url(taken)}/")
        typer.echo(f"Try: {_curl(taken, options)}")
        typer.echo(_room(llm))

    listen(taken)
    server = Server(app, engine, shutdown_timeout=options.shutdown_timeout, ready=ready)
    server.run(sockets=[taken])
    if not engine.stopped:
        # Nothing ends a thread that computes, and an interpreter that is torn down under it aborts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(server.failed))
    if server.failed:
        raise typer.Exit(1)


def _room(llm: LLM) -> str:
    """What a request can have, and what keeps it from more."""
    memory, built = format_size(llm.built.layout.arena.total_bytes), llm.built
    said = f"The cache has {memory}; a request may have {built.max_model_len:,} tokens"
    wanted = llm.config.max_model_len or built.spec.max_model_len
    if built.max_model_len == wanted:
        return f"{said}."
    return f"{said}, of the model's {wanted:,}: raise --kv-memory for more."


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path} cannot be read: {error}") from error


def _curl(taken: Any, options: Options) -> str:
    """A request that works as it stands. A key is named and not told: what is printed ends in
    logs.
    """
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if options.api_key else ""
    body = shlex.quote('{"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}')
    return f"curl {url(taken)}/v1/completions -H 'Content-Type: application/json'{key} -d {body}"
