"""The Python API: prompts in, texts out.

Owns ``LLM``: turning prompts and parameters into requests, and token events into outputs. Knows no devices and no layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.base import ConfigError
from octavo.config import EngineConfig, parse_size
from octavo.engine.build import build
from octavo.engine.core import EngineCore, TokenEvent
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.source import resolve
from octavo.engine.text import TextStream, Tokenizer, load_tokenizer
from octavo.runner.weights import Progress as WeightProgress
from octavo.runner.weights import no_progress
from octavo.sched.request import FinishReason, Request
from octavo.sched.sampling import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
"""A text, token ids, or ``{"prompt_token_ids": ids}``."""


@dataclass(kw_only=True)
class _Live:
    """A request on its way, and its text so far."""

    request: Request
    prompt: str | None
    stream: TextStream | None
    reason: str | None = None

    def output(self) -> RequestOutput:
        """What there is now."""
        text = "" if self.stream is None else self.stream.text
        completion = CompletionOutput(
            index=0, text=text, token_ids=list(self.request.output_token_ids), finish_reason=self.reason
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[completion],
            num_cached_tokens=self.request.num_cached_tokens,
            cache_report=self.request.cache_report if self.reason else None,
            finished=self.reason is not None,
        )


class LLM:
    """A model that continues prompts.

    model: directory with safetensors, ``.gguf`` file, or Hub id. dtype: ``auto``, ``float32`` or ``bfloat16``.
    kv_memory: bytes, or a size such as ``2GiB``, for everything the layers remember; by default a share of what is free.
    max_model_len: most tokens of one request, prompt and output. seed: for requests that bring none.
    plugins: modules, or their names, with further kinds and families.
    skip_tokenizer_init: prompts are token ids and outputs have no text.

    Raises ConfigError for wrong arguments and files, UnsupportedError for a model that octavo cannot run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        device: str = "auto",
        plugins: Sequence[ModuleType | str] = (),
        skip_tokenizer_init: bool = False,
        weight_progress: WeightProgress = no_progress,
    ) -> None:
        self.config = EngineConfig(
            model=str(model),
            dtype=dtype,
            kv_memory=None if kv_memory is None else parse_size(kv_memory, "kv_memory"),
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            device=device,
            plugins=tuple(plugins),
        )
        source = resolve(model)
        self.tokenizer: Tokenizer | None = None if skip_tokenizer_init else load_tokenizer(source)
        self.built = build(self.config, source, progress=weight_progress)
        own = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        self._eos = self.built.eos_token_ids or own
        self._ids = count()

    @property
    def core(self) -> EngineCore:
        """Scheduler and runner, for those who step by themselves."""
        return self.built.core

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs stand in the order of the prompts.

        prompts: one prompt or a list of them. params: one for all, or one per prompt; by default ``SamplingParams()``.
        progress: show a bar on standard error.
        Raises CapacityError, before anything is computed, where a prompt can never fit.
        """
        requests = self._requests(prompts, params)
        outputs: dict[str, RequestOutput] = {}
        with _bar(len(requests), shown=progress and bool(requests)) as advance:
            for output in self._run(requests):
                if output.finished:
                    outputs[output.request_id] = output
                    advance(len(output.outputs[0].token_ids))
        return [outputs[live.request.request_id] for live in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt; yields what there is after every step, and at last the finished output."""
        (live,) = self._requests([prompt], params)
        yield from self._run([live])

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Live]:
        many = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params)
            if len(each) != len(many):
                raise ConfigError(f"there are {len(many)} prompts and {len(each)} params; give one for all or one per prompt")
        return [self._request(prompt, one) for prompt, one in zip(many, each, strict=True)]

    def _request(self, prompt: Prompt, params: SamplingParams) -> _Live:
        text, ids = self._tokens(prompt)
        vocab = self.built.spec.vocab_size
        wrong = [token for token in ids if not 0 <= token < vocab]
        if wrong:
            raise ConfigError(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}")
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need the tokenizer; leave skip_tokenizer_init off, or use stop_token_ids")
        return _Live(
            request=Request(request_id=str(next(self._ids)), prompt_token_ids=ids, params=params, eos_token_ids=self._eos),
            prompt=text,
            stream=None if self.tokenizer is None else TextStream(self.tokenizer, ids, params.stop),
        )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("a text prompt needs the tokenizer; leave skip_tokenizer_init off, or give token ids")
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise ConfigError(
                    f"a prompt given as a mapping needs prompt_token_ids, not {', '.join(map(str, prompt)) or 'nothing'}"
                )
            return None, [int(token) for token in prompt["prompt_token_ids"]]
        return None, [int(token) for token in prompt]

    def _run(self, requests: Sequence[_Live]) -> Iterator[RequestOutput]:
        """Step until every request has ended; whoever stops listening ends the rest."""
        live = {one.request.request_id: one for one in requests}
        try:
            for one in requests:
                self.core.add(one.request)
            while live:
                for event in self.core.step():
                    if event.request_id in live:
                        yield self._advance(live, event)
        finally:
            for request_id in live:
                self.core.abort(request_id)

    def _advance(self, live: dict[str, _Live], event: TokenEvent) -> RequestOutput:
        one = live[event.request_id]
        one.reason = None if event.finish_reason is None else str(event.finish_reason)
        if one.stream is not None:
            self._write(one.stream, one.request, event)
            if one.stream.stopped:
                one.reason = str(FinishReason.STOP)
        if one.reason is not None:
            if event.finish_reason is None:
                self.core.abort(event.request_id)
            del live[event.request_id]
        return one.output()

    def _write(self, stream: TextStream, request: Request, event: TokenEvent) -> None:
        tokens = event.token_ids
        # The token that ends a text is not part of it.
        if event.finish_reason is FinishReason.STOP and tokens and self._ends(request, tokens[-1]):
            tokens = tokens[:-1]
        stream.push(tokens, last=event.finish_reason is not None)

    def _ends(self, request: Request, token: int) -> bool:
        ends_text = token in request.eos_token_ids and not request.params.ignore_eos
        return ends_text or token in request.params.stop_token_ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]  # type: ignore[list-item]
    for index, prompt in enumerate(many):
        if isinstance(prompt, int):
            raise ConfigError(f"prompt {index} is a number among prompts; a prompt is a text or a list of token ids")
    return many  # type: ignore[return-value]


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[_Advance]:
    """A progress bar over requests on standard error, with the count of tokens made."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts · {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("Generating", total=total, tokens=0)
        yield _Advance(bar, task)


class _Advance:
    """Moves the bar by one request."""

    def __init__(self, bar: Progress, task: object) -> None:
        self._bar, self._task, self._tokens = bar, task, 0

    def __call__(self, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(self._task, advance=1, tokens=self._tokens)  # type: ignore[arg-type]
