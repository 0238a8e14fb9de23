"""The Python API: prompts in, texts out.

Owns ``LLM``: loading a model, and stepping until everything asked for is there. Knows no devices
and no layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo import arguments
from octavo.base import ConfigError
from octavo.config import EngineConfig, parse_size
from octavo.engine.build import build
from octavo.engine.core import EngineCore
from octavo.engine.errors import RequestFailedError, StepFailedError
from octavo.engine.live import Live, Prompt, Prompts
from octavo.engine.outputs import RequestOutput
from octavo.engine.source import resolve
from octavo.engine.text import Tokenizer, load_tokenizer
from octavo.runner.weights import Progress as WeightProgress
from octavo.runner.weights import no_progress
from octavo.sched.sampling import SamplingParams

LOG = logging.getLogger(__name__)


class LLM:
    """A model that continues prompts.

    model: directory with safetensors, ``.gguf`` file, or Hub id. dtype: ``auto``, ``float32`` or
        ``bfloat16``.
    kv_cache_dtype: ``auto``, ``fp32``, ``bf16``, ``fp16`` or ``fp8``, of keys, values, latents and
        compressed entries; ``auto``
    is ``dtype``. indexer_cache_dtype: of index keys, also ``fp4``; ``auto`` is as
    ``kv_cache_dtype``.
    kv_memory: bytes, or a size such as ``2GiB``, for everything the layers remember; by default a
        share of what is free.
    max_model_len: most tokens of one request, prompt and output.
    checkpoint_interval: tokens between regular resume points of prefixes, for models whose layers
        let go; costs their pages.
    eviction: which remembered prefixes go first: ``worth`` keeps what was found before and what
        saves much for its bytes, ``lru`` what was used last.
    seed: of requests that bring none, so that a call can be repeated with equal outputs; without it
        they differ each time.
    plugins: modules, or their names, with further kinds, families and backends.
    dump_dir: folder for what is left behind where the scheduler breaks: ``auto`` is octavo's own
        below ``$XDG_STATE_HOME``, ``none`` leaves nothing.
    skip_tokenizer_init: prompts are token ids and outputs have no text.

    Raises ConfigError for wrong arguments and files, UnsupportedError for a model that octavo
    cannot run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        indexer_cache_dtype: str = "auto",
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        checkpoint_interval: int | None = None,
        eviction: str = "worth",
        seed: int | None = None,
        device: str = "auto",
        plugins: Sequence[ModuleType | str] = (),
        dump_dir: str | Path = "auto",
        skip_tokenizer_init: bool = False,
        weight_progress: WeightProgress = no_progress,
    ) -> None:
        self.config = EngineConfig(
            model=str(model),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            indexer_cache_dtype=indexer_cache_dtype,
            kv_memory=None if kv_memory is None else parse_size(kv_memory, "kv_memory"),
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            checkpoint_interval=checkpoint_interval,
            eviction=eviction,
            seed=seed,
            device=device,
            plugins=tuple(plugins),
            dump_dir=str(dump_dir),
        )
        source = resolve(model)
        # A large vocabulary takes seconds, which reading the weights takes too.
        with ThreadPoolExecutor(1) as beside:
            tokenizer = None if skip_tokenizer_init else beside.submit(load_tokenizer, source)
            self.built = build(self.config, source, progress=weight_progress)
            self.tokenizer: Tokenizer | None = None if tokenizer is None else tokenizer.result()
        own = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        self.prompts = Prompts(
            self.tokenizer,
            vocab_size=self.built.spec.vocab_size,
            eos_token_ids=self.built.eos_token_ids or own,
            seed=self.config.seed,
        )
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

        prompts: one prompt or a list of them. params: one for all, or one per prompt; by default
            ``SamplingParams()``.
        progress: show a bar on standard error.

        Raises CapacityError, before anything is computed, where a prompt can never fit, and
        StepFailedError where a step crashed. Where something goes wrong with one prompt, its output
        says so in ``error``, and the others are computed.
        """
        requests = self._requests(prompts, params)
        outputs: dict[str, RequestOutput] = {}
        with _bar(len(requests), shown=progress and bool(requests)) as advance:
            for live in self._run(requests):
                if live.finished:
                    output = outputs[live.request.request_id] = live.output()
                    advance(sum(len(completion.token_ids) for completion in output.outputs))
        return [outputs[live.request.request_id] for live in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; yields what there is after every step, and at last the finished
        output. Raises OctavoError where something goes wrong with it.
        """
        for live in self._run(self._requests([prompt], params)):
            if live.error is not None:
                raise live.error
            yield live.output()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Live]:
        many = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = arguments.many("params", params, "SamplingParams")
            if len(each) != len(many):
                raise ConfigError(
                    f"there are {len(many)} prompts and {len(each)} params; give one for all or one"
                    " per prompt"
                )
        return [
            self.prompts.make(prompt, one, request_id=str(next(self._ids)), number=number)
            for number, (prompt, one) in enumerate(zip(many, each, strict=True))
        ]

    def _run(self, requests: Sequence[Live]) -> Iterator[Live]:
        """Step until every request has ended, giving each that got something; whoever stops
        listening ends the rest.

        Raises StepFailedError from the crash of a step, EngineDeadError where the scheduler breaks
        too often.
        """
        live = {one.request.request_id: one for one in requests}
        try:
            for one in requests:
                try:
                    self.core.add(one.request)
                except RequestFailedError as error:
                    one.fail(error)
                    del live[one.request.request_id]
                    yield one
            while live:
                for event in self.core.step():
                    if event.request_id not in live:
                        continue
                    if isinstance(event.error, StepFailedError):
                        raise event.error
                    one = live[event.request_id]
                    if event.error is not None:
                        LOG.error("request %s: %s", event.request_id, event.error)
                        one.fail(event.error)
                    else:
                        one.advance(self.core, event)
                    if one.finished:
                        del live[event.request_id]
                    yield one
        finally:
            for request_id in live:
                self.core.abort(request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = arguments.many("prompts", prompts, "prompts")
    if many and all(isinstance(item, int) for item in many):
        return [many]
    for index, prompt in enumerate(many):
        if isinstance(prompt, int):
            raise ConfigError(
                f"prompt {index} is a number among prompts; a prompt is a text or a list of"
                " token ids"
            )
    return many


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
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task("Generating", total=total, tokens=0)
        yield _Advance(bar, task)


class _Advance:
    """Moves the bar by one request."""

    def __init__(self, bar: Progress, task: object) -> None:
        self._bar, self._task, self._tokens = bar, task, 0

    def __call__(self, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(self._task, advance=1, tokens=self._tokens)  # type: ignore[arg-type]
