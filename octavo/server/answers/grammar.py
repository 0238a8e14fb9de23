"""Grammars that make a model write calls, in its own form and with arguments that suit the tools.

Owns the writing of every form as a Lark grammar for llguidance, and what may come before: thoughts.
Knows formats, schemas, and which markers are special tokens; no request and no stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

from octavo.base import ConfigError
from octavo.engine.structured import WHITESPACE
from octavo.server.answers.calls import Schemas, types_of
from octavo.server.answers.formats import Format

TEXT = r"/(.|\n)*/"
STRING_BOUNDS = ("minLength", "maxLength", "pattern", "format", "const")
"""What cannot be asked of a text that a form writes bare."""

ABOUT = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "$defs", "definitions"),
        *("$schema", "$id", "$comment", "type", "enum", "nullable"),
    }
)
"""Keys of a schema that change nothing, or that every form knows."""


class Grammar:
    """Rules while they are written. special: ids of special tokens by their texts."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        words = sorted(special, key=len, reverse=True)
        self._words = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self._rules: list[str] = []
        self._numbers = count()

    def literal(self, text: str) -> str:
        """A text as part of a rule: markers that are special tokens are named, the rest spelled."""
        parts, at = [], 0
        for match in self._words.finditer(text):
            if match.start() > at:
                parts.append(json.dumps(text[at : match.start()], ensure_ascii=False))
            parts.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        if at < len(text):
            parts.append(json.dumps(text[at:], ensure_ascii=False))
        return " ".join(parts) or '""'

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """A new rule; returns its name."""
        name = f"r{next(self._numbers)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def until(self, marker: str) -> str:
        """Any text up to a marker, and the marker."""
        if marker in self._special:
            return f"{TEXT} {self.literal(marker)}"
        return self.rule(f"{TEXT} {json.dumps(marker, ensure_ascii=False)}", lazy=True)

    def json(self, schema: Any, root: Mapping[str, Any]) -> str:
        """JSON that suits a schema. root: where its references point."""
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        if schema is False:
            whole = {"enum": []}
        for name in ("$defs", "definitions"):
            if name in root and name not in whole:
                whole[name] = root[name]
        whole["x-guidance"] = {"whitespace_pattern": WHITESPACE}
        return self.rule(f"%json {json.dumps(whole, ensure_ascii=False)}")

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])


Arguments = Callable[[Grammar, Mapping[str, Any]], str]
"""A schema of arguments to a part of a rule."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How calls are written. before, after: around all of them. between: two of them. begin, end:
    around the arguments of one, ``NAME`` and ``NUMBER`` standing for those. single: no more than
    one in an answer.
    """

    begin: str
    end: str
    arguments: Arguments
    before: str = ""
    after: str = ""
    between: str = ""
    single: bool = False


def of_json(grammar: Grammar, schema: Mapping[str, Any]) -> str:
    """Arguments as a JSON object."""
    return grammar.json({"type": "object", **schema}, schema)


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """Arguments one behind another, each between markers. ``KEY`` stands for the name, ``TEXT`` for
    whether the value is text.
    """

    begin: str
    end: str

    def __call__(self, grammar: Grammar, schema: Mapping[str, Any]) -> str:
        parts = []
        for key, wanted, required in properties(schema):
            bare = is_text(wanted)
            begin = self.begin.replace("KEY", key).replace("TEXT", str(bare).lower())
            if not bare:
                value = f"{grammar.json(wanted, schema)} {grammar.literal(self.end)}"
            elif chosen := choices(wanted, key):
                one = " | ".join(map(grammar.literal, chosen))
                value = f"({one}) {grammar.literal(self.end)}"
            else:
                value = grammar.until(self.end)
            part = f"{grammar.literal(begin)} {value}"
            parts.append(part if required else f"({part})?")
        return " ".join(parts) or '""'


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Arguments parted by commas: ``KEY`` and the value. quote: around texts, None for JSON's."""

    key: str
    between: str
    quote: str | None = None

    def __call__(self, grammar: Grammar, schema: Mapping[str, Any]) -> str:
        return self.members(grammar, schema, schema)

    def members(self, grammar: Grammar, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Properties in order, optional ones or not."""
        first = later = '""'
        for key, wanted, required in reversed(list(properties(schema))):
            name = grammar.literal(self.key.replace("KEY", key))
            item = grammar.rule(f"{name} {self.value(grammar, wanted, root)}")
            comma = grammar.literal(self.between)
            begun, going_on = f"{item} {later}", f"{comma} {item} {later}"
            first = grammar.rule(begun if required else f"{begun} | {first}")
            later = grammar.rule(going_on if required else f"{going_on} | {later}")
        return first

    def value(self, grammar: Grammar, schema: Any, root: Mapping[str, Any]) -> str:
        """One value."""
        if self.quote is None:
            return grammar.json(schema, root)
        return self._quoted(grammar, resolved(schema, root), root, depth=0)

    def _quoted(self, grammar: Grammar, schema: Any, root: Mapping[str, Any], *, depth: int) -> str:
        assert self.quote is not None
        if depth > 8:
            raise ConfigError("schemas that nest deeper than 8 levels are not supported here")
        quote = grammar.literal(self.quote)
        unions = schema.get("anyOf") or schema.get("oneOf")
        if unions:
            known(schema, "anyOf", "oneOf")
            each = (resolved(one, root) for one in unions)
            return (
                f"({' | '.join(self._quoted(grammar, one, root, depth=depth + 1) for one in each)})"
            )
        options = []
        given = schema.get("enum")
        if given is not None:
            known(schema)
            for one in given:
                text = isinstance(one, str)
                spelled = grammar.literal(one if text else json.dumps(one))
                options.append(f"{quote} {spelled} {quote}" if text else spelled)
            return f"({' | '.join(options)})"
        kinds = types_of(schema) or {"string", "number", "boolean", "null"}
        for kind in sorted(kinds):
            if kind == "string":
                choices(schema, "a text")
                options.append(f"{quote} {grammar.until(self.quote)}")
            elif kind == "array":
                known(schema, "items")
                item = resolved(schema.get("items", {}), root)
                one = grammar.rule(self._quoted(grammar, item, root, depth=depth + 1))
                options.append(f'"[" ({one} ("," {one})*)? "]"')
            elif kind == "object":
                known(schema, "properties", "required", "additionalProperties")
                options.append(f'"{{" {self._members(grammar, schema, root, depth + 1)} "}}"')
            else:
                options.append(grammar.json({**schema, "type": kind}, root))
        return f"({' | '.join(options)})"

    def _members(
        self, grammar: Grammar, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> str:
        if depth > 8:
            raise ConfigError("schemas that nest deeper than 8 levels are not supported here")
        return self.members(grammar, schema, root)


def properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """(name, schema, whether it must be there) of every property."""
    required = schema.get("required") or ()
    for key, wanted in (schema.get("properties") or {}).items():
        yield key, wanted, key in required


def is_text(schema: Any) -> bool:
    """Whether a value is a text and nothing else."""
    return types_of(schema) == frozenset({"string"})


def choices(schema: Mapping[str, Any], key: str) -> list[str]:
    """The texts of which a value is one; none where any will do. Raises ConfigError for what cannot
    be asked of a text that is written bare.
    """
    for bound in STRING_BOUNDS:
        if bound in schema:
            raise ConfigError(f"{bound} of {key} is not supported in this model's form of calls")
    return [one for one in schema.get("enum") or () if isinstance(one, str)]


def known(schema: Mapping[str, Any], *more: str) -> None:
    """Raise ConfigError for a key that a form without JSON cannot keep."""
    for key in schema:
        if key not in ABOUT and key not in more:
            raise ConfigError(f"{key} is not supported in this model's form of calls")


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one that it refers to. Raises ConfigError for a reference to elsewhere."""
    if not isinstance(schema, Mapping):
        return {}
    if "$ref" not in schema:
        return schema
    found: Any = root
    for step in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or "$ref" in found:
        raise ConfigError(f"$ref {schema['$ref']!r} is not supported in this model's form of calls")
    return found


UNKNOWN = (
    "tools: it is not known how this model writes calls; whoever runs the server can say it with"
    " --answer-format"
)
OBJECT = '{"name": "NAME", "arguments": '
QUOTED = MappingProxyType({"gemma": '<|"|>', "function_gemma": "<escape>"})

WRITINGS: Mapping[str, Writing] = MappingProxyType(
    {
        "hermes": Writing(
            begin=f"<tool_call>\n{OBJECT}",
            end="}\n</tool_call>",
            between="\n",
            arguments=of_json,
        ),
        "list": Writing(
            before="<|tool_call|>[",
            begin=OBJECT,
            end="}",
            between=", ",
            after="]<|/tool_call|>",
            arguments=of_json,
        ),
        "mistral": Writing(begin="[TOOL_CALLS]NAME[ARGS]", end="", arguments=of_json),
        "mistral_list": Writing(
            before="[TOOL_CALLS] [",
            begin=OBJECT,
            end="}",
            between=", ",
            after="]",
            arguments=of_json,
        ),
        "llama": Writing(
            begin='{"name": "NAME", "parameters": ', end="}", arguments=of_json, single=True
        ),
        "harmony": Writing(
            begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            end="",
            arguments=of_json,
            single=True,
        ),
        "deepseek": Writing(
            before="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            after="<｜tool▁calls▁end｜>",
            arguments=of_json,
        ),
        "deepseek_fenced": Writing(
            before="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
            between="\n",
            after="<｜tool▁calls▁end｜>",
            arguments=of_json,
        ),
        "kimi": Writing(
            before="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            after="<|tool_calls_section_end|>",
            arguments=of_json,
        ),
        "glm": Writing(
            begin="<tool_call>NAME",
            end="\n</tool_call>",
            between="\n",
            arguments=Tagged(begin="\n<arg_key>KEY</arg_key>\n<arg_value>", end="</arg_value>"),
        ),
        "xml": Writing(
            begin="<tool_call>\n<function=NAME>\n",
            end="</function>\n</tool_call>",
            between="\n",
            arguments=Tagged(begin="<parameter=KEY>\n", end="\n</parameter>\n"),
        ),
        "dsml": Writing(
            before="<｜DSML｜function_calls>\n",
            begin='<｜DSML｜invoke name="NAME">\n',
            end="</｜DSML｜invoke>\n",
            after="</｜DSML｜function_calls>",
            arguments=Tagged(
                begin='<｜DSML｜parameter name="KEY" string="TEXT">', end="</｜DSML｜parameter>\n"
            ),
        ),
        "gemma": Writing(
            begin="<|tool_call>call:NAME{",
            end="}<tool_call|>",
            arguments=Listed(key="KEY:", between=",", quote=QUOTED["gemma"]),
        ),
        "function_gemma": Writing(
            begin="<start_function_call>call:NAME{",
            end="}<end_function_call>",
            arguments=Listed(key="KEY:", between=",", quote=QUOTED["function_gemma"]),
        ),
        "lfm2": Writing(
            before="<|tool_call_start|>[",
            begin="NAME(",
            end=")",
            between=", ",
            after="]<|tool_call_end|>",
            arguments=Listed(key="KEY=", between=", "),
        ),
        "pythonic": Writing(
            before="[",
            begin="NAME(",
            end=")",
            between=", ",
            after="]",
            arguments=Listed(key="KEY=", between=", "),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Where an answer begins. thinking: in thoughts that the prompt has opened. silent: behind
    thoughts that the prompt has closed.
    """

    thinking: bool = False
    silent: bool = False
    special: Mapping[str, int] = field(default_factory=dict)


def calls_grammar(
    form: Format,
    schemas: Schemas,
    opening: Opening,
    *,
    many: bool = True,
    free: bool = False,
    body: bool = False,
) -> str:
    """A grammar of answers that call tools: at least one, in any order; exactly one where not
    ``many``. free: text and no call will do, but what begins like a call is one. body: ``@body``
    instead of calls will do.

    Raises ConfigError where the form, or an argument in it, cannot be written so.
    """
    writing = WRITINGS.get(_writing(form, opening.special))
    if writing is None:
        raise ConfigError(UNKNOWN)
    grammar = Grammar(opening.special)
    trigger = _trigger(form, writing) if free else ""
    if free and writing.before:
        writing = replace(writing, before=writing.before.removeprefix(trigger))
    elif free:
        writing = replace(writing, begin=writing.begin.removeprefix(trigger), single=True)
    try:
        calls = [_call(grammar, writing, name, schema) for name, schema in schemas.items()]
    except ConfigError as error:
        raise ConfigError(f"tools: {error}") from None
    one = grammar.rule(" | ".join(calls))
    before, after = grammar.literal(writing.before), grammar.literal(writing.after)
    more = f"({grammar.literal(writing.between)} {one})*" if many and not writing.single else ""
    answer = f"{before} {one} {more} {after}"
    if free and form.writing == "harmony":
        final = grammar.literal("final<|message|>")
        answer = f"{grammar.literal(trigger)} ({answer} | {final} {TEXT})"
    elif free:
        # Text ends at the marker, so that no call is written in another way.
        again = "*" if many else "?"
        answer = f"({grammar.until(trigger)} {answer}){again} {TEXT}"
    if body:
        answer = f"({answer} | {_final(grammar, form)} @body)"
    return grammar.text(f"{_thoughts(grammar, form, opening)} {answer}")


def _trigger(form: Format, writing: Writing) -> str:
    """What a call begins with, and no text holds."""
    marker = re.match(r"<[^>]+>|\[[A-Z_]+\]", writing.before or writing.begin)
    if marker is None:
        raise ConfigError(
            f"tools: strict needs tool_choice: required with the format {form.name}, whose calls"
            " begin with no marker"
        )
    return marker[0]


def _writing(form: Format, special: Mapping[str, int]) -> str:
    old = form.writing == "mistral" and "[ARGS]" not in special
    return "mistral_list" if old else form.writing


def _call(grammar: Grammar, writing: Writing, name: str, schema: Mapping[str, Any]) -> str:
    begin = [grammar.literal(part) for part in writing.begin.replace("NAME", name).split("NUMBER")]
    arguments = writing.arguments(grammar, schema)
    return grammar.rule(
        f"{' /[0-9]{1,3}/ '.join(begin)} {arguments} {grammar.literal(writing.end)}"
    )


def around_body(form: Format, opening: Opening) -> str | None:
    """A grammar of thoughts and ``@body``; None where nothing may come before the body."""
    grammar = Grammar(opening.special)
    before = f"{_thoughts(grammar, form, opening)} {_final(grammar, form)}".strip()
    return grammar.text(f"{before} @body") if before else None


def _final(grammar: Grammar, form: Format) -> str:
    """What text that is no thought begins with."""
    return grammar.literal("<|channel|>final<|message|>") if form.writing == "harmony" else ""


def _thoughts(grammar: Grammar, form: Format, opening: Opening) -> str:
    if form.writing == "harmony":
        begin = grammar.literal("<|channel|>analysis<|message|>")
        behind = grammar.literal("<|start|>assistant")
        return f"({begin} {grammar.until('<|end|>')} {behind})?"
    if form.writing == "gemma":
        begin = grammar.literal("<|channel>thought\n")
        return f"({begin} {grammar.until('<channel|>')})?"
    if form.thoughts is None or opening.silent:
        return ""
    opened, closed = form.thoughts
    blank = r"/\s{0,4}/"
    if opening.thinking:
        return f"{grammar.until(closed)} {blank}"
    return f"({grammar.literal(opened)} {grammar.until(closed)} {blank})?"
