"""From prompts to requests, and from token events to text: what the synchronous and the
asynchronous API have in common.

Owns ``Prompts`` (checks and tokens) and ``Live`` (a request on its way, and its continuations'
texts). Knows no thread and no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo import arguments
from octavo.base import ConfigError, OctavoError
from octavo.engine.core import EngineCore, TokenEvent
from octavo.engine.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from octavo.engine.structured import Grammars
from octavo.engine.text import TextStream, Tokenizer
from octavo.sched.request import FinishReason, Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import TokenLogprobs

Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
"""A text, token ids, or ``{"prompt_token_ids": ids}``."""


LARGEST = 2**62
"""Bound on numbers that only have an order or a place."""


class Prompts:
    """Makes requests for one model. tokenizer: None where prompts are token ids and outputs have no
    text. seed: of requests that bring none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        seed: int | None = None,
    ) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab_size, eos_token_ids
        self._grammars = Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._seed = seed

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        marks: Sequence[int] = (),
        number: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> Live:
        """A request, ready to be added. Raises ConfigError naming what is wrong with it.

        number: which of the prompts of one call it is; they draw from different sequences of the
        engine's seed. shown: special tokens that are part of the text.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, not {arguments.shown(params)}")
        name = arguments.text("request_id", request_id)
        if not name:
            raise ConfigError("request_id must not be empty; leave it out to have one made")
        text, ids = self._tokens(prompt)
        self._check_ids("prompt", ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        special = frozenset(arguments.wholes("shown", shown, "token ids"))
        self._check_ids("shown", special)
        if params.stop and self._tokenizer is None:
            raise ConfigError(
                "stop strings need the tokenizer; leave skip_tokenizer_init off, or use"
                " stop_token_ids"
            )
        wanted = params.structured_outputs
        request = Request(
            request_id=name,
            prompt_token_ids=ids,
            params=self._seeded(params, arguments.whole("number", number)),
            eos_token_ids=self._eos,
            priority=_limited("priority", priority, -LARGEST),
            cache_salt=arguments.text("cache_salt", cache_salt),
            marks=tuple(
                _limited("marks", mark, 0)
                for mark in arguments.wholes("marks", marks, "numbers of prompt tokens")
            ),
            constraint=None if wanted is None else self._grammars.constraint(wanted),
        )
        tokenizer = self._tokenizer
        return Live(request, text, None if tokenizer is None else tokenizer.showing(special))

    def _seeded(self, params: SamplingParams, number: int) -> SamplingParams:
        if params.seed is not None or self._seed is None:
            return params
        return replace(params, seed=nth_seed(self._seed, number))

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        wrong = [token for token in ids if not 0 <= token < self._vocab]
        if wrong:
            raise ConfigError(
                f"{name}: token id {wrong[0]} is outside the model's vocabulary of {self._vocab}"
            )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigError(
                    "a text prompt needs the tokenizer; leave skip_tokenizer_init off, or give"
                    " token ids"
                )
            return prompt, self._tokenizer.encode(arguments.text("prompt", prompt))
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise ConfigError(
                    "a prompt given as a mapping needs prompt_token_ids, not"
                    f" {', '.join(map(str, prompt)) or 'nothing'}"
                )
            prompt = prompt["prompt_token_ids"]
        return None, arguments.wholes("prompt", prompt, "token ids")


def _limited(name: str, value: Any, least: int) -> int:
    """A whole number that numpy can count with."""
    found = arguments.whole(name, value)
    if not least <= found <= LARGEST:
        raise ConfigError(f"{name} must be in [{least}, {LARGEST}], not {arguments.shown(found)}")
    return found


def nth_seed(seed: int, number: int) -> int:
    """The seed of prompt ``number`` of a call; the first has ``seed`` itself."""
    if not number:
        return seed
    named = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8)
    return int.from_bytes(named.digest(), "little") >> 1


class _Continuation:
    """One branch of a live request."""

    def __init__(self, stream: TextStream | None) -> None:
        self.stream = stream
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


class Live:
    """A request on its way, and what there is of its continuations."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request, self.prompt = request, prompt
        ids, stops = request.prompt_token_ids, request.params.stop
        self._branches = [
            _Continuation(None if tokenizer is None else TextStream(tokenizer, ids, stops))
            for _ in range(request.params.n)
        ]
        self._begun = False
        self.error: OctavoError | None = None

    @property
    def finished(self) -> bool:
        """True once every continuation has ended."""
        return all(branch.finish_reason is not None for branch in self._branches)

    def fail(self, error: OctavoError) -> None:
        """End every continuation that goes on: something went wrong with the request."""
        self.error = error
        for branch in self._branches:
            branch.finish_reason = branch.finish_reason or str(FinishReason.ERROR)

    def advance(self, core: EngineCore, event: TokenEvent) -> RequestDelta:
        """Take an event. A continuation that a stop string ends is ended in the core too."""
        branch, params = self._branches[event.branch], self.request.params
        text = self._write(branch, event)
        branch.token_ids += event.token_ids
        branch.logprobs += event.logprobs
        branch.finish_reason = None if event.finish_reason is None else str(event.finish_reason)
        if branch.stream is not None and branch.stream.stopped:
            branch.finish_reason, branch.stop_reason = str(FinishReason.STOP), branch.stream.matched
            if event.finish_reason is None:
                core.abort(event.request_id, event.branch)
        elif event.finish_reason is FinishReason.STOP:
            branch.stop_reason = event.token_ids[-1]
        delta = CompletionDelta(
            index=event.branch,
            text=text,
            token_ids=event.token_ids,
            finish_reason=branch.finish_reason,
            stop_reason=branch.stop_reason,
            logprobs=event.logprobs if params.logprobs is not None else None,
        )
        return self._delta(core, delta)

    def _delta(self, core: EngineCore, delta: CompletionDelta) -> RequestDelta:
        first, self._begun = not self._begun, True
        return RequestDelta(
            request_id=self.request.request_id,
            prompt_token_ids=list(self.request.prompt_token_ids) if first else [],
            outputs=(delta,),
            num_cached_tokens=self.request.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs() if first else None,
            explanation=core.scheduler.explain(self.request.request_id) if first else None,
            cache_report=self.request.cache_report if self.finished else None,
            finished=self.finished,
        )

    def _write(self, branch: _Continuation, event: TokenEvent) -> str:
        if branch.stream is None:
            return ""
        params, tokens, last = self.request.params, event.token_ids, event.finish_reason is not None
        may_stop = len(branch.token_ids) + len(tokens) > params.min_tokens
        # The token that ends a text is not part of it.
        if event.finish_reason is FinishReason.STOP and self._ends(tokens[-1]):
            tokens = tokens[:-1]
        return branch.stream.push(tokens, last=last, may_stop=may_stop)

    def _ends(self, token: int) -> bool:
        ends_text = token in self.request.eos_token_ids and not self.request.params.ignore_eos
        return ends_text or token in self.request.params.stop_token_ids

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        return None if self.request.params.prompt_logprobs is None else (None, *self.request.scored)

    def output(self) -> RequestOutput:
        """What there is now."""
        asked, scored = self.request.params.logprobs is not None, self._prompt_logprobs()
        completions = [
            CompletionOutput(
                index=index,
                text="" if branch.stream is None else branch.stream.text,
                token_ids=list(branch.token_ids),
                finish_reason=branch.finish_reason,
                stop_reason=branch.stop_reason,
                logprobs=list(branch.logprobs) if asked else None,
            )
            for index, branch in enumerate(self._branches)
        ]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=completions,
            num_cached_tokens=self.request.num_cached_tokens,
            prompt_logprobs=None if scored is None else list(scored),
            cache_report=self.request.cache_report if self.finished else None,
            finished=self.finished,
            error=None if self.error is None else str(self.error),
        )
