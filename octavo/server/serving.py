"""What all endpoints share: the engine, the name it is served by, and how a request becomes streams
of tokens.

Owns ``Serving``, the reading of sampling fields, and the counting of tokens. Knows no response
format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from octavo.base import ConfigError
from octavo.cache.report import HitExplanation
from octavo.engine.outputs import RequestDelta
from octavo.engine.text import Tokenizer
from octavo.sched.sampling import SamplingParams
from octavo.sched.structured import StructuredOutputs
from octavo.server.answers.asked import form_of
from octavo.server.answers.formats import Format
from octavo.server.errors import ModelNotFoundError
from octavo.server.fields import Notices
from octavo.server.requests import INT32, Body, Generation
from octavo.server.responses import PromptTokensDetails, Usage
from octavo.server.stream import merged

if TYPE_CHECKING:
    from octavo.engine.aio import AsyncLLM

COMMON = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
"""Fields that requests and ``SamplingParams`` have in common."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One engine under one name.

    created: seconds since 1970 at which it began to serve. answer_format: how the model writes
    thoughts and calls, ``auto`` for what its chat template tells. notices: unknown fields that were
    told.
    """

    engine: AsyncLLM
    name: str
    created: int
    answer_format: str = "auto"
    notices: Notices = field(default_factory=Notices)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, without which there is no server."""
        assert self.engine.tokenizer is not None, "checked when the server was made"
        return self.engine.tokenizer

    @property
    def form(self) -> Format:
        """How the model writes thoughts and calls."""
        return form_of(self.tokenizer, self.answer_format)

    def now(self) -> int:
        """Seconds since 1970."""
        return int(time.time())

    def receive(self, body: Body, model: str | None) -> None:
        """Begin to serve a request. Raises ModelNotFoundError for a model that is not served
        here.
        """
        self.notices.tell(body.unknown())
        if model:
            self.check_model(model)

    def check_model(self, name: str) -> None:
        """Raise ModelNotFoundError for a model that is not served here."""
        if name != self.name:
            raise ModelNotFoundError(
                f"The model `{name}` does not exist here; this server has `{self.name}`"
            )

    def start(
        self,
        body: Generation,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        name: str,
        marks: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        """Streams of all prompts as one. Nothing is computed before it is iterated.

        Raises ConfigError for more continuations than the engine ever takes at once: waiting would
        not help.
        """
        wanted, most = len(prompts) * params.n, self.engine.max_unfinished
        if wanted > most:
            field = "n" if len(prompts) == 1 else "prompt"
            raise ConfigError(
                f"{field} asks for {wanted} continuations; this server runs and queues {most} at"
                " once"
            )
        streams = [
            self.engine.stream(
                prompt,
                params,
                request_id=f"{name}-{index}",
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                marks=marks,
                number=index,
                **({"shown": shown} if shown else {}),
            )
            for index, prompt in enumerate(prompts)
        ]
        return merged(streams)


def new_id(kind: str) -> str:
    """A name for a response, such as ``cmpl-...``."""
    return f"{kind}-{uuid4().hex}"


def sampling_params(
    body: Generation,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured_outputs: StructuredOutputs | None = None,
) -> SamplingParams:
    """Sampling fields of a request. Raises ConfigError naming the field that is wrong."""
    given = {name: value for name in COMMON if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **given,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_outputs,
    )


def token_limit(body: Generation, default: int | None) -> int | None:
    """Most tokens of the answer, None for as many as fit. Raises ConfigError where the two names of
    the limit have different values.
    """
    limits = {
        name: limit
        for name in ("max_tokens", "max_completion_tokens")
        if (limit := getattr(body, name)) is not None
    }
    if len(set(limits.values())) > 1:
        said = " and ".join(f"{name} {limit}" for name, limit in limits.items())
        raise ConfigError(f"{said} differ, and mean the same; send one of them")
    limit = next(iter(limits.values()), default)
    return None if limit is None or limit < 0 else min(limit, INT32)


async def encode(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text; a long one keeps nobody waiting."""
    return await asyncio.to_thread(tokenizer.encode, text, special=special)


@dataclass
class Tally:
    """What a response says about itself: tokens, and for every prompt why it hit what it hit."""

    prompts: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    explanations: dict[int, HitExplanation | None] = field(default_factory=dict)

    def add(self, index: int, delta: RequestDelta) -> None:
        """Count a delta of prompt ``index``."""
        self.prompt_tokens += len(delta.prompt_token_ids)
        self.completion_tokens += sum(len(output.token_ids) for output in delta.outputs)
        self.cached[index] = delta.num_cached_tokens
        if index not in self.explanations:
            self.explanations[index] = delta.explanation

    def usage(self) -> Usage:
        """As the OpenAI API says it."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached.values())),
        )

    def cache(self) -> HitExplanation | list[HitExplanation | None] | None:
        """The explanation of the only prompt, or of each."""
        found = [self.explanations.get(index) for index in range(self.prompts)]
        return found if self.prompts > 1 else found[0]


class UsageChunks:
    """What the chunks of a stream say of its tokens, as ``stream_options`` asks."""

    def __init__(self, body: Generation, tally: Tally) -> None:
        options = body.stream_options
        self._last = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._tally = tally

    def beside(self) -> dict[str, Usage | None]:
        """Fields of a chunk with text."""
        if self._always:
            return {"usage": self._tally.usage()}
        return {"usage": None} if self._last else {}

    def last(self) -> dict[str, Usage | None]:
        """Fields of the chunk behind all text, which is there only if it has any."""
        return {"usage": self._tally.usage()} if self._last else {}
