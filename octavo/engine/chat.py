"""Conversations as tokens, by the checkpoint's own template.

Owns rendering, the rule that control tokens are written by the template alone, and where in a
conversation a part ends that will come again. Knows Transformers' templates; no request and no
HTTP.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateSyntaxError

from octavo.base import ConfigError

Messages = Sequence[Mapping[str, Any]]
Mark = tuple[int, int]
"""(message, characters of its content) up to which a conversation will come again."""

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
SAYS = 200
"""Most characters of a template's own complaint that are repeated."""


class ChatTemplate:
    """The chat template of a tokenizer, which may have none."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def check(self) -> None:
        """Raise ConfigError, with the line, for a template that cannot be compiled; none is no
        mistake.
        """
        if not self._backend.chat_template:
            return
        try:
            self._backend.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"line {error.lineno}: {error.message}") from error
        except Exception:
            # Whether a template likes this conversation is nobody's question here.
            return

    def tokens(
        self,
        messages: Messages,
        *,
        marks: Sequence[Mark] = (),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: bool,
    ) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and for every mark the number of them that what comes after
        it cannot change.

        Where the rest of a prompt begins follows from what the template makes of another rest: up
        to there, both are the same. arguments: variables of the template. tools: what the model
        may call. options:
        ``add_generation_prompt`` and ``continue_final_message``. Raises ConfigError where there is
        no template or it refuses the messages, and for marks where the tokenizer cannot say which
        characters its tokens stand for.
        """
        if not self._backend.chat_template:
            raise ConfigError(
                "this model has no chat template; give one (--chat-template of octavo serve), or"
                " the prompt as plain text"
            )
        self._check_arguments(arguments)
        if tools:
            if not self.knows_tools:
                raise ConfigError(
                    "tools: the model's chat template does not show them to the model; give one"
                    " that does with --chat-template"
                )
            arguments = {**arguments, "tools": list(tools)}
        if marks and not self._backend.is_fast:
            raise ConfigError(
                "cache_control needs a tokenizer that knows the characters of its tokens; leave"
                " it out"
            )
        text, forged = self._render(messages, arguments, options)
        varied = [
            self._render(changed, arguments, {**options, **ended})
            for changed, ended in (_vary(messages, mark) for mark in marks)
        ]
        if forged or any(each for _, each in varied):
            ids = self._encode_marked(text)
            return ids, [_alike(ids, self._encode_marked(other)) for other, _ in varied]
        if not marks:
            return list(self._backend(text, add_special_tokens=False).input_ids), []
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded.offset_mapping]
        shared = [_shared(text, other) for other, _ in varied]
        return list(encoded.input_ids), [bisect_right(ends, length) for length in shared]

    @property
    def source(self) -> str:
        """The template's text, of all of them where there are several; empty where there is
        none.
        """
        given = self._backend.chat_template or ""
        return "\0".join(map(str, given.values())) if isinstance(given, dict) else str(given)

    @property
    def knows_tools(self) -> bool:
        """Whether the template writes what tools there are."""
        return re.search(r"\btools\b", self.source) is not None

    @cached_property
    def _own_arguments(self) -> frozenset[str]:
        """Names that the rendering itself gives values to."""
        names = inspect.signature(self._backend.apply_chat_template).parameters
        return frozenset({*names, "self", "messages", "conversations"} - {"documents", "kwargs"})

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        for name in arguments:
            if name in self._own_arguments:
                raise ConfigError(
                    f"chat_template_kwargs: {name} is no variable of the template; leave it out, or"
                    " send it as a field of the request where it is one"
                )

    def _render(
        self, messages: Messages, arguments: Mapping[str, Any], options: Mapping[str, bool]
    ) -> tuple[str, bool]:
        """(text, whether it holds what looks like control tokens and is none). In such a text they
        stand between marks, as Transformers makes them.
        """
        said = [self._as_text(message, own=_is_own(message)) for message in messages]
        told = self._as_text(arguments, own=False)
        forged = [*said, told] != [*map(dict, messages), dict(arguments)]
        try:
            text = self._backend.apply_chat_template(said, tokenize=False, **options, **told)
        except Exception as error:
            # Templates are programs, and fail in every way that programs do.
            raise ConfigError(
                f"messages do not suit the model's chat template: {str(error)[:SAYS]}"
            ) from error
        return str(text), forged

    def _as_text(self, said: Mapping[str, Any], *, own: bool) -> dict[str, Any]:
        """What was said, every control token that it spells out marked as text."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        pattern = self._control(own)
        if not any(pattern.search(text) for text in _texts(said)):
            return dict(said)
        return dict(mark_control_tokens(dict(said), pattern))

    def _control(self, own: bool) -> re.Pattern[str]:
        """Control tokens: special ones, and words that the template writes. The latter are the
        model's ``own`` where it thinks or calls tools.
        """
        written = self.source
        words = sorted(
            (
                token.content
                for token in self._backend.added_tokens_decoder.values()
                if token.special
                or (not own and not token.content.isspace() and token.content in written)
            ),
            key=len,
            reverse=True,
        )
        return re.compile("|".join(map(re.escape, words)) or "(?!)")

    def _encode_marked(self, text: str) -> list[int]:
        from transformers.utils.chat_template_utils import encode_marked_chat

        try:
            return list(encode_marked_chat(self._backend, text))
        except ValueError as error:
            raise ConfigError(
                f"messages hold a control token that this tokenizer cannot write as text: {error}"
            ) from error


def _is_own(message: Mapping[str, Any]) -> bool:
    """Did the model say it?"""
    return message.get("role") == "assistant"


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, at every level."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _vary(messages: Messages, mark: Mark) -> tuple[Messages, dict[str, bool]]:
    """The conversation with another text behind a mark, and changed options: without an answer to
    come where nothing is behind it.
    """
    index, kept = mark
    if kept == len(messages[index]["content"]):
        index, kept = index + 1, 0
    if index == len(messages):
        return messages, {"add_generation_prompt": False, "continue_final_message": False}
    message = messages[index]
    content = message["content"]
    other = "1" if content[kept:].lstrip().startswith("0") else "0"
    changed = {**message, "content": content[:kept] + other}
    return [*messages[:index], changed, *messages[index + 1 :]], {}


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return bisect_left(
        range(1, min(len(one), len(other)) + 1),
        True,
        key=lambda length: one[:length] != other[:length],
    )


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
