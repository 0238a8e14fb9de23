"""POST /v1/chat/completions: conversations answered, whole or streamed.

Owns the form of its responses, and which of a conversation's tokens are marked as lasting. The
checkpoint's own template decides what a conversation is as tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.base import ConfigError
from octavo.engine.outputs import CompletionDelta, RequestDelta
from octavo.engine.text import Tokenizer
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.requests import MAX_MARKS, ChatRequest, Message, Templated, TokenizeRequest
from octavo.server.responses import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from octavo.server.serving import Serving, Tally, UsageChunks, new_id, sampling_params, token_limit
from octavo.server.stream import EventStream, event, until_gone

Deltas = AsyncGenerator[tuple[int, RequestDelta], None]


async def chat(serving: Serving, body: ChatRequest, request: Request) -> Response:
    """Answer one request."""
    serving.receive(body, body.model)
    return await until_gone(request.receive, _answer(serving, body))


async def _answer(serving: Serving, body: ChatRequest) -> Response:
    if body.top_logprobs and not body.logprobs:
        raise ConfigError("top_logprobs needs logprobs: true")
    if body.stream and body.prompt_logprobs is not None:
        raise ConfigError("prompt_logprobs of a chat needs stream: false")
    params = sampling_params(
        body,
        max_tokens=token_limit(body, None),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    ids, marks = await render(serving.tokenizer, body)
    writer = _Writer(serving, body)
    deltas = serving.start(body, [ids], params, name=writer.id, marks=marks)
    if not body.stream:
        return Response(
            (await writer.whole(deltas)).model_dump_json(exclude_unset=True),
            media_type="application/json",
        )
    events = writer.events(deltas)
    return EventStream(await anext(events), events)


async def render(
    tokenizer: Tokenizer, body: ChatRequest | TokenizeRequest
) -> tuple[list[int], list[int]]:
    """(token ids, marks) of a conversation; a long one keeps nobody waiting. Raises ConfigError
    where it cannot be told.
    """
    messages, marks = flatten(body.messages or ())
    going_on = bool(body.continue_final_message)
    return await asyncio.to_thread(
        tokenizer.chat_prompt,
        messages,
        marks=marks,
        add_generation_prompt=body.add_generation_prompt is not False and not going_on,
        continue_final_message=going_on,
        arguments=template_arguments(body),
    )


def template_arguments(body: Templated) -> dict[str, Any]:
    """Variables of the chat template that a request brings.

    ``reasoning_effort`` is one that templates of reasoning models read. Others know only whether to
    think at all, by one of two names; ``none`` tells them not to.
    """
    effort = body.reasoning_effort
    silent = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    said = {"reasoning_effort": effort} if effort else {}
    return {**silent, **said, **(body.chat_template_kwargs or {})}


def flatten(messages: Sequence[Message]) -> tuple[list[dict[str, str]], list[tuple[int, int]]]:
    """Messages as templates know them, and (message, characters) of every ``cache_control``."""
    flat, marks = [], []
    for index, message in enumerate(messages):
        text = ""
        if isinstance(message.content, str):
            text = message.content
        else:
            for number, part in enumerate(message.content):
                text += ("\n" if number else "") + part.text
                if part.cache_control is not None:
                    marks.append((index, len(text)))
        if message.cache_control is not None:
            marks.append((index, len(text)))
        role = "system" if message.role == "developer" else message.role
        more = {"name": message.name, "reasoning_content": _reasoning(message)}
        flat.append(
            {"role": role, "content": text}
            | {name: value for name, value in more.items() if value is not None}
        )
    if len(marks) > MAX_MARKS:
        raise ConfigError(
            f"cache_control may stand in {MAX_MARKS} places of a request, not {len(marks)}"
        )
    return flat, marks


def _reasoning(message: Message) -> str | None:
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


class _Writer:
    """Writes the response to one request, piece by piece."""

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        self.id = new_id("chatcmpl")
        self._serving, self._body = serving, body
        self._created = serving.now()
        self._tally = Tally(1)

    async def whole(self, deltas: Deltas) -> Chat:
        """The finished response."""
        outputs: dict[int, list[CompletionDelta]] = {}
        more: dict[str, Any] = {}
        async with aclosing(deltas):
            async for _, delta in deltas:
                if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                    more["prompt_logprobs"] = prompt_logprobs(
                        self._serving.tokenizer, delta.prompt_logprobs
                    )
                self._tally.add(0, delta)
                for output in delta.outputs:
                    outputs.setdefault(output.index, []).append(output)
        return Chat(
            id=self.id,
            object="chat.completion",
            created=self._created,
            model=self._serving.name,
            choices=[self._choice(outputs[index]) for index in sorted(outputs)],
            usage=self._tally.usage(),
            **more,
            **self._cache(),
        )

    def _choice(self, pieces: list[CompletionDelta]) -> ChatChoice:
        tokens = [token for piece in pieces for token in piece.logprobs or ()]
        text, end = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
        assert end is not None, "the last delta of a continuation says why it ended"
        return ChatChoice(
            index=pieces[0].index,
            message=ChatMessage(role="assistant", content=text, refusal=None),
            logprobs=chat_logprobs(self._serving.tokenizer, tokens)
            if self._body.logprobs
            else None,
            finish_reason=end,
            stop_reason=pieces[-1].stop_reason,
        )

    async def events(self, deltas: Deltas) -> AsyncGenerator[str, None]:
        """Chunks as server-sent events: for every choice its role, its text, and why it ended; then
        what was counted.
        """
        usage, begun = UsageChunks(self._body, self._tally), False
        async with aclosing(deltas):
            async for _, delta in deltas:
                self._tally.add(0, delta)
                if not begun:
                    begun, role = True, ChatDelta(role="assistant", content="", refusal=None)
                    for index in range(self._body.n or 1):
                        yield event(self._chunk([self._piece(index, role)], **usage.beside()))
                for choice in self._pieces(delta):
                    yield event(self._chunk([choice], **usage.beside()))
        last = usage.last() | self._cache()
        if last:
            yield event(self._chunk([], **last))

    def _pieces(self, delta: RequestDelta) -> Iterator[ChatChunkChoice]:
        for output in delta.outputs:
            logprobs = None
            if self._body.logprobs and output.logprobs:
                logprobs = chat_logprobs(self._serving.tokenizer, output.logprobs)
            if output.text or logprobs is not None:
                yield self._piece(output.index, ChatDelta(content=output.text), logprobs)
            if output.finish_reason is not None:
                end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
                yield self._piece(output.index, ChatDelta()).model_copy(update=end)

    def _piece(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None
    ) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._serving.name,
            choices=choices,
            **more,
        )

    def _cache(self) -> dict[str, Any]:
        return {"cache": self._tally.cache()} if self._body.explain_cache else {}
