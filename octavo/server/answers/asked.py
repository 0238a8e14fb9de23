"""What a request asks of its answer's form: tools, thoughts and structure, brought together.

Owns ``Asked``: which tools the template shows, which grammar the tokens keep to, which special
tokens are part of the text, and who reads it. Knows requests and formats; no stream and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Final
from uuid import uuid4

from octavo.base import ConfigError
from octavo.engine.outputs import CompletionDelta
from octavo.engine.text import Tokenizer
from octavo.sched.structured import StructuredOutputs
from octavo.server.answers.calls import Call, Schemas
from octavo.server.answers.formats import Format, format_of
from octavo.server.answers.grammar import UNKNOWN, Opening, around_body, calls_grammar
from octavo.server.answers.parser import CALLS, AnswerParser, Piece
from octavo.server.requests import ChosenTool, Generation, Tool

TAIL = 64
"""Tokens at a prompt's end among which thoughts may begin or have ended."""

NO_ARGUMENTS: Final = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Of one request.

    form: how the model writes. tools: as the template sees them, None where the model is told of
    none. schemas: of tools whose calls are read. forced: calls and nothing else is an answer.
    strict: what begins like a call is one. many: several calls are. structure: of an answer that
    calls nothing. hidden: special tokens other than the format's are no part of the text.
    """

    form: Format
    tools: Sequence[Mapping[str, Any]] | None = None
    schemas: Schemas | None = None
    forced: bool = False
    strict: bool = False
    many: bool = True
    structure: StructuredOutputs | None = None
    hidden: bool = True

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that are part of the text."""
        special = special_tokens(tokenizer)
        if not self.hidden:
            return frozenset(special.values())
        markers = tuple(self.form.shown())
        template = str(self.form.template or "").replace("\\", "")
        return frozenset(
            token
            for text, token in special.items()
            if any(marker in text for marker in markers) or (text and text in template)
        )

    def constrained(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> StructuredOutputs | None:
        """What the tokens keep to behind a prompt. Raises ConfigError where that cannot be."""
        opening = self._opening(tokenizer, prompt)
        if self.schemas is not None and (self.forced or self.strict):
            both = self.structure is not None and not self.forced
            grammar = calls_grammar(
                self.form,
                self.schemas,
                opening,
                many=self.many,
                free=self.strict and not self.forced and not both,
                body=both,
            )
            if both and self.structure is not None:
                return replace(self.structure, around=grammar)
            return StructuredOutputs(grammar=grammar, field="tools")
        if self.structure is None:
            return None
        return replace(self.structure, around=around_body(self.form, opening))

    def parser(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> AnswerParser | Plain:
        """Who reads one answer."""
        form = self.form
        if not (form.thoughts or form.regions or form.template) and self.schemas is None:
            return Plain()
        opening = self._opening(tokenizer, prompt)
        return AnswerParser(form, self.schemas, thinking=opening.thinking, many=self.many)

    def _opening(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Opening:
        special = special_tokens(tokenizer)
        if self.form.thoughts is None:
            return Opening(special=special)
        shown = tokenizer.showing(frozenset(special.values()))
        tail = shown.decode(prompt[-TAIL:]).rstrip()
        opened, closed = self.form.thoughts
        return Opening(
            thinking=tail.endswith(opened), silent=tail.endswith(closed), special=special
        )


class Plain:
    """Reads answers of models that write nothing but text."""

    def push(self, text: str) -> Iterator[Piece]:
        """More of the answer."""
        if text:
            yield Piece(text=text)

    def finish(self) -> Iterator[Piece]:
        """There is no more."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class NamedCall:
    """A call with its name. number: which of the answer's it is."""

    id: str
    number: int
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Said:
    """What is new of an answer: text, thought text, or a whole call; one of them."""

    text: str = ""
    thought: str = ""
    call: NamedCall | None = None


class Answers:
    """Reads the continuations of one prompt, each by itself."""

    def __init__(self, wanted: Asked, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._form = wanted.form
        self._make = partial(wanted.parser, tokenizer, prompt)
        self._parsers: dict[int, AnswerParser | Plain] = {}
        self._calls: dict[int, int] = {}

    def read(self, output: CompletionDelta) -> Iterator[Said]:
        """What a delta adds."""
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self._make()
        yield from self._named(output.index, parser.push(output.text))
        if output.finish_reason is not None:
            yield from self._named(output.index, parser.finish())

    def _named(self, index: int, pieces: Iterator[Piece]) -> Iterator[Said]:
        for piece in pieces:
            if piece.call is None:
                yield Said(text=piece.text, thought=piece.thought)
                continue
            number = self._calls.get(index, 0)
            self._calls[index] = number + 1
            name = call_id(self._form, piece.call, number)
            one = piece.call
            yield Said(
                call=NamedCall(id=name, number=number, name=one.name, arguments=one.arguments)
            )

    def end(self, output: CompletionDelta) -> str | None:
        """Why a continuation ended, once it was read: in calls, where it stopped behind some."""
        called = self._calls.get(output.index) and output.finish_reason == "stop"
        return "tool_calls" if called else output.finish_reason


def call_id(form: Format, one: Call, number: int) -> str:
    """A name for a call, in the form that the model's template takes back."""
    if form.id == "short":
        return uuid4().hex[:9]
    if form.id == "kimi":
        return f"functions.{one.name}:{number}"
    return f"call_{uuid4().hex[:24]}"


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Ids of special tokens by their text."""
    return _special(tokenizer.backend, len(tokenizer.backend))


@lru_cache(maxsize=4)
def _special(backend: Any, size: int) -> Mapping[str, int]:
    return {
        added.content: token
        for token, added in backend.added_tokens_decoder.items()
        if added.special and added.content
    }


def form_of(tokenizer: Tokenizer, wanted: str) -> Format:
    """The format of a model's answers; ``auto`` goes by its chat template. Raises ConfigError for a
    format that there is not.
    """
    own = getattr(tokenizer.backend, "response_template", None)
    return _form(tokenizer.template.source, _Whole(own), wanted)


@dataclass(frozen=True)
class _Whole:
    """A response template, equal to itself only."""

    template: Any = field(hash=False)


@lru_cache(maxsize=8)
def _form(source: str, own: _Whole, wanted: str) -> Format:
    return format_of(source, own.template, wanted)


def asked(
    form: Format,
    body: Generation,
    *,
    tools: Sequence[Tool] | None = None,
    choice: str | ChosenTool | None = None,
    parallel: bool | None = None,
) -> Asked:
    """What a request asks for. Raises ConfigError naming the field that is wrong."""
    found = Asked(
        form=form, structure=structure_of(body), hidden=body.skip_special_tokens is not False
    )
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ConfigError("tool_choice needs tools to choose from")
        return found
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"tools: there are two of the name {twice!r}")
    if choice == "none":
        return found
    if form.calls is None and CALLS not in (form.template or {}).get("fields", {}):
        raise ConfigError(UNKNOWN)
    wanted = names
    if isinstance(choice, ChosenTool):
        if choice.function.name not in names:
            raise ConfigError(f"tool_choice: there is no tool {choice.function.name!r}")
        wanted = [choice.function.name]
    return replace(
        found,
        tools=[told(tool) for tool in tools],
        schemas={
            tool.function.name: tool.function.parameters or NO_ARGUMENTS
            for tool in tools
            if tool.function.name in wanted
        },
        forced=choice == "required" or isinstance(choice, ChosenTool),
        strict=any(tool.function.strict for tool in tools) or found.structure is not None,
        many=parallel is not False and not isinstance(choice, ChosenTool),
    )


def told(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates know it."""
    function = tool.function
    said = {"name": function.name, "description": function.description}
    return {
        "type": "function",
        "function": {
            **{name: value for name, value in said.items() if value is not None},
            "parameters": function.parameters or NO_ARGUMENTS,
        },
    }


def structure_of(body: Generation) -> StructuredOutputs | None:
    """What the output looks like, by whichever name it was asked for. Raises ConfigError where
    several ask.
    """
    asked_for = {
        name: value
        for name, value in (
            ("response_format", _of_format(body)),
            ("structured_outputs", _of_structure(body)),
            *(
                (f"guided_{kind}", _guided(body, kind))
                for kind in ("json", "regex", "choice", "grammar")
            ),
        )
        if value is not None
    }
    if len(asked_for) > 1:
        raise ConfigError(f"{' and '.join(asked_for)} both say what the output looks like")
    return next(iter(asked_for.values()), None)


def _of_format(body: Generation) -> StructuredOutputs | None:
    wanted, name = body.response_format, "response_format"
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" and wanted.plain_schema is None:
        return StructuredOutputs(json_object=True, field=name)
    found = wanted.json_schema
    schema = wanted.plain_schema if found is None else found.json_schema
    if wanted.type == "json_schema" and schema is None:
        raise ConfigError("response_format: json_schema needs a schema")
    return StructuredOutputs(json=schema, field=name)


def _of_structure(body: Generation) -> StructuredOutputs | None:
    wanted = body.structured_outputs
    if wanted is None:
        return None
    return StructuredOutputs(
        json=wanted.json_schema,
        json_object=wanted.json_object,
        regex=wanted.regex,
        choice=wanted.choice,
        grammar=wanted.grammar,
    )


def _guided(body: Generation, kind: str) -> StructuredOutputs | None:
    value = getattr(body, f"guided_{kind}")
    return None if value is None else StructuredOutputs(**{kind: value}, field=f"guided_{kind}")
