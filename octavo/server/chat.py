"""POST /v1/chat/completions: conversations answered, whole or streamed.

Owns the form of its responses, and which of a conversation's tokens are marked as lasting. The
checkpoint's own template decides what a conversation is as tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.base import ConfigError
from octavo.engine.outputs import CompletionDelta, RequestDelta
from octavo.engine.text import Tokenizer
from octavo.server.answers.asked import Answers, Said, asked
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.requests import (
    MAX_MARKS,
    ChatRequest,
    Message,
    Templated,
    TokenizeRequest,
    ToolCall,
)
from octavo.server.responses import (
    Called,
    Chat,
    ChatCall,
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
    tokenizer, choice = serving.tokenizer, body.tool_choice
    wanted = asked(
        serving.form, body, tools=body.tools, choice=choice, parallel=body.parallel_tool_calls
    )
    ids, marks = await render(tokenizer, body, tools=wanted.tools)
    params = sampling_params(
        body,
        max_tokens=token_limit(body, None),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured_outputs=wanted.constrained(tokenizer, ids),
    )
    writer = _Writer(serving, body, Answers(wanted, tokenizer, ids))
    shown = wanted.shown(tokenizer)
    deltas = serving.start(body, [ids], params, name=writer.id, marks=marks, shown=shown)
    if not body.stream:
        return Response(
            (await writer.whole(deltas)).model_dump_json(exclude_unset=True),
            media_type="application/json",
        )
    events = writer.events(deltas)
    return EventStream(await anext(events), events)


async def render(
    tokenizer: Tokenizer,
    body: ChatRequest | TokenizeRequest,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
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
        tools=tools,
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


def flatten(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Messages as templates know them, and (message, characters) of every ``cache_control``."""
    flat: list[dict[str, Any]] = []
    marks = []
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
        more = {
            "name": message.name,
            "reasoning_content": _reasoning(message),
            "tool_calls": [_called(call) for call in message.tool_calls or ()] or None,
            "tool_call_id": message.tool_call_id,
        }
        flat.append(
            {"role": role, "content": text}
            | {name: value for name, value in more.items() if value is not None}
        )
    if len(marks) > MAX_MARKS:
        raise ConfigError(
            f"cache_control may stand in {MAX_MARKS} places of a request, not {len(marks)}"
        )
    return flat, marks


def _called(call: ToolCall) -> dict[str, Any]:
    """A call as templates know it: most want its arguments as an object."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            said = json.loads(arguments or "{}")
            arguments = said if isinstance(said, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _reasoning(message: Message) -> str | None:
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


def _said(said: Said) -> ChatDelta:
    """A piece of an answer as a stream tells it."""
    if said.call is not None:
        function = Called(name=said.call.name, arguments=said.call.arguments)
        call = ChatCall(index=said.call.number, id=said.call.id, type="function", function=function)
        return ChatDelta(tool_calls=[call])
    return (
        ChatDelta(reasoning_content=said.thought) if said.thought else ChatDelta(content=said.text)
    )


class _Writer:
    """Writes the response to one request, piece by piece."""

    def __init__(self, serving: Serving, body: ChatRequest, answers: Answers) -> None:
        self.id = new_id("chatcmpl")
        self._serving, self._body, self._answers = serving, body, answers
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
        said = [one for piece in pieces for one in self._answers.read(piece)]
        text, thought = "".join(one.text for one in said), "".join(one.thought for one in said)
        calls = [one.call for one in said if one.call is not None]
        end = self._answers.end(pieces[-1])
        assert end is not None, "the last delta of a continuation says why it ended"
        message = ChatMessage(
            role="assistant", content=None if calls and not text else text, refusal=None
        )
        if thought:
            message.reasoning_content = thought
        if calls:
            message.tool_calls = [
                ChatCall(
                    id=call.id,
                    type="function",
                    function=Called(name=call.name, arguments=call.arguments),
                )
                for call in calls
            ]
        return ChatChoice(
            index=pieces[0].index,
            message=message,
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
            for said in self._answers.read(output):
                yield self._piece(output.index, _said(said), logprobs)
                logprobs = None
            if logprobs is not None:
                yield self._piece(output.index, ChatDelta(content=""), logprobs)
            if output.finish_reason is not None:
                reason = self._answers.end(output)
                end = {"finish_reason": reason, "stop_reason": output.stop_reason}
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
