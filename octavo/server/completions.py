"""POST /v1/completions: prompts continued, whole or streamed.

Owns the form of its responses. Knows the engine's deltas; knows no chat.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.base import ConfigError
from octavo.engine.outputs import CompletionDelta, RequestDelta
from octavo.server.answers.asked import asked
from octavo.server.answers.formats import NONE
from octavo.server.logprobs import LogprobsWriter, joined, prompt_logprobs
from octavo.server.requests import CompletionRequest
from octavo.server.responses import Completion, CompletionChoice
from octavo.server.serving import (
    Serving,
    Tally,
    UsageChunks,
    encode,
    new_id,
    sampling_params,
    token_limit,
)
from octavo.server.stream import EventStream, event, until_gone

Deltas = AsyncGenerator[tuple[int, RequestDelta], None]
DEFAULT_MAX_TOKENS = 16


async def complete(serving: Serving, body: CompletionRequest, request: Request) -> Response:
    """Answer one request."""
    serving.receive(body, body.model)
    return await until_gone(request.receive, _answer(serving, body))


async def _answer(serving: Serving, body: CompletionRequest) -> Response:
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(scored or 0, body.logprobs)
    wanted = asked(NONE, body)
    params = sampling_params(
        body,
        max_tokens=token_limit(body, DEFAULT_MAX_TOKENS),
        logprobs=body.logprobs,
        prompt_logprobs=scored,
        structured_outputs=wanted.structure,
    )
    if body.best_of is not None and body.best_of != params.n:
        raise ConfigError(
            f"best_of must equal n, which is {params.n}; octavo returns all that it makes"
        )
    texts = _prompts(body.prompt)
    if body.cache_marks and len(texts) > 1:
        raise ConfigError("cache_marks needs a single prompt")
    prompts = [
        await encode(serving.tokenizer, text, special=body.add_special_tokens is not False)
        if isinstance(text, str)
        else text
        for text in texts
    ]
    writer = _Writer(serving, body, texts)
    deltas = serving.start(
        body,
        prompts,
        params,
        name=writer.id,
        marks=body.cache_marks or (),
        shown=wanted.shown(serving.tokenizer),
    )
    if not body.stream:
        return Response(
            (await writer.whole(deltas)).model_dump_json(exclude_unset=True),
            media_type="application/json",
        )
    events = writer.events(deltas)
    return EventStream(await anext(events), events)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or many, as many."""
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return list(prompt) if many else [prompt]


class _Writer:
    """Writes the response to one request, piece by piece."""

    def __init__(
        self, serving: Serving, body: CompletionRequest, prompts: list[str | list[int]]
    ) -> None:
        self.id = new_id("cmpl")
        self._serving, self._body, self._prompts = serving, body, prompts
        self._created = serving.now()
        self._tally = Tally(len(prompts))
        self._firsts: dict[int, RequestDelta] = {}
        self._logprobs: dict[int, LogprobsWriter] = {}
        self._begun: set[int] = set()

    async def whole(self, deltas: Deltas) -> Completion:
        """The finished response."""
        pieces: dict[int, list[CompletionChoice]] = {}
        async with aclosing(deltas):
            async for index, delta in deltas:
                for choice in self._choices(index, delta):
                    pieces.setdefault(choice.index, []).append(choice)
        choices = [_join(pieces[index]) for index in sorted(pieces)]
        return self._completion(choices, usage=self._tally.usage(), **self._cache())

    async def events(self, deltas: Deltas) -> AsyncGenerator[str, None]:
        """Chunks as server-sent events."""
        usage = UsageChunks(self._body, self._tally)
        async with aclosing(deltas):
            async for index, delta in deltas:
                for choice in self._choices(index, delta):
                    if (
                        choice.text
                        or choice.logprobs is not None
                        or choice.finish_reason is not None
                    ):
                        yield event(self._completion([choice], **usage.beside()))
        last = usage.last() | self._cache()
        if last:
            yield event(self._completion([], **last))

    def _completion(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        name = self._serving.name
        return Completion(
            id=self.id,
            object="text_completion",
            created=self._created,
            model=name,
            choices=choices,
            **more,
        )

    def _cache(self) -> dict[str, Any]:
        return {"cache": self._tally.cache()} if self._body.explain_cache else {}

    def _choices(self, index: int, delta: RequestDelta) -> Iterator[CompletionChoice]:
        self._tally.add(index, delta)
        first = self._firsts.setdefault(index, delta)
        for output in delta.outputs:
            yield self._choice(index, first, output)

    def _choice(self, index: int, first: RequestDelta, output: CompletionDelta) -> CompletionChoice:
        body, tokenizer = self._body, self._serving.tokenizer
        number = index * (body.n or 1) + output.index
        begins, text, logprobs, more = number not in self._begun, output.text, [], {}
        self._begun.add(number)
        if body.logprobs is not None:
            writer = self._logprobs.setdefault(number, LogprobsWriter(tokenizer, body.logprobs))
            if begins and body.echo:
                logprobs.append(writer.push(first.prompt_token_ids, first.prompt_logprobs or ()))
            logprobs.append(writer.push(output.token_ids, output.logprobs or ()))
        if begins and body.echo:
            prompt = self._prompts[index]
            text = (prompt if isinstance(prompt, str) else tokenizer.decode(prompt)) + text
        if begins and body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(tokenizer, first.prompt_logprobs or ())
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=joined(logprobs) if logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            **more,
        )


def _join(pieces: list[CompletionChoice]) -> CompletionChoice:
    """All pieces of a choice as one."""
    first, last = pieces[0], pieces[-1]
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    whole = {
        "text": "".join(piece.text for piece in pieces),
        "logprobs": joined(logprobs) if logprobs else None,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
    return first.model_copy(update=whole)
