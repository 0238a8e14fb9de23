"""Calls of tools as models write them: from the text between two markers to names and arguments.

Owns ``Call`` and a reader for every form. A reader raises ValueError for what is no call; the text
then stays text. Knows no markers and no streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing.content_parsers import parse_content

Schemas = Mapping[str, Mapping[str, Any]]
"""Of every tool by its name, the JSON schema of its arguments."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. arguments: a JSON object, as text."""

    name: str
    arguments: str


Reader = Callable[[str, Schemas], list[Call]]
"""From the text between the markers. Raises ValueError where it is no call."""


def call(name: Any, arguments: Any) -> Call:
    """A call of plain values. Raises ValueError where they are no name and no object."""
    if isinstance(arguments, str):
        arguments = load(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call is a name and an object of arguments")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError as error:
        raise ValueError("arguments hold a lone surrogate") from error
    return Call(name=name.strip(), arguments=written)


def load(text: str) -> Any:
    """JSON, and nothing more lenient. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def of_object(said: Any) -> Call:
    """A call as an object, which has its arguments under one of two names."""
    if not isinstance(said, dict) or ("arguments" in said) == ("parameters" in said):
        raise ValueError("a call is an object with name and arguments")
    return call(said.get("name"), said.get("arguments", said.get("parameters")))


def read_object(text: str, schemas: Schemas) -> list[Call]:
    """``{"name": ..., "arguments": {...}}``"""
    return [of_object(load(text))]


def read_objects(text: str, schemas: Schemas) -> list[Call]:
    """A list of objects, or one of them."""
    said = load(text)
    if said == []:
        raise ValueError("no call at all")
    return [of_object(item) for item in (said if isinstance(said, list) else [said])]


def read_known_objects(text: str, schemas: Schemas) -> list[Call]:
    """Objects one after another, parted by semicolons; of known tools only, since nothing but that
    tells them from an answer in JSON.
    """
    calls, decoder, at = [], json.JSONDecoder(parse_constant=_refuse), 0
    while at < len(text):
        try:
            said, at = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        calls.append(of_object(said))
        at = _blank(text, at)
        if text.startswith(";", at):
            at = _blank(text, at + 1)
    if not calls or any(one.name not in schemas for one in calls):
        raise ValueError("no call of a known tool")
    return calls


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def read_python(text: str, schemas: Schemas) -> list[Call]:
    """``[name(key=value), ...]``"""
    found = parse_content(text.strip(), "python-call-list", {})
    if not found:
        raise ValueError("no call at all")
    return [call(one["name"], one["arguments"]) for one in found]


def read_named(text: str, schemas: Schemas) -> list[Call]:
    """``name[ARGS]{...}``, and with an id before the arguments."""
    match = re.fullmatch(
        r"([\w.\-/:]+)\s*(?:\[CALL_ID\][^\[\]{]*)?(?:\[ARGS\])?\s*(\{.*\})", text.strip(), re.DOTALL
    )
    if match is None:
        raise ValueError("no name and arguments")
    return [call(match[1], match[2])]


def read_list_or_named(text: str, schemas: Schemas) -> list[Call]:
    """Either form of Mistral's models."""
    return (read_objects if text.lstrip().startswith(("[{", "[ {", "{", "[\n")) else read_named)(
        text, schemas
    )


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+)"
    r"(?:<｜tool▁sep｜>|\n```json\n)(?P<inside>.*?)<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """Names and JSON between DeepSeek's own tokens, of V3 (in a fence) and V3.1."""
    return [
        call(match["name"], match["inside"].strip().removesuffix("```"))
        for match in _all(_DEEPSEEK, text)
    ]


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)


def read_kimi(text: str, schemas: Schemas) -> list[Call]:
    """``functions.name:0`` and JSON between Kimi's own tokens."""
    return [call(match[1], match[2]) for match in _all(_KIMI, text)]


_DSML = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>\s*', re.DOTALL)
_DSML_ARGUMENT = re.compile(
    r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="(?P<text>true|false)")?>'
    r"(?P<value>.*?)</｜DSML｜parameter>\s*",
    re.DOTALL,
)


def read_dsml(text: str, schemas: Schemas) -> list[Call]:
    """``<｜DSML｜invoke name="...">`` with parameters that say whether they are text."""
    calls = []
    for match in _all(_DSML, text):
        arguments = {}
        for one in _all(_DSML_ARGUMENT, match[2], empty=True):
            told = one["text"]
            arguments[one["key"]] = (
                typed(one["value"], match[1], one["key"], schemas)
                if told is None
                else one["value"]
                if told == "true"
                else load(one["value"])
            )
        calls.append(call(match[1], arguments))
    return calls


_XML = re.compile(r"<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_XML_ARGUMENT = re.compile(
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL
)


def read_xml(text: str, schemas: Schemas) -> list[Call]:
    """``<function=name><parameter=key>value</parameter></function>``"""
    return [
        call(match[1], _arguments(_XML_ARGUMENT, match[2], match[1], schemas))
        for match in _all(_XML, text)
    ]


_GLM = re.compile(r"([^<]+)((?:<arg_key>.*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL
)


def read_glm(text: str, schemas: Schemas) -> list[Call]:
    """A name, and keys and values by turns."""
    match = _GLM.fullmatch(text)
    if match is None or "\n" in match[1].strip():
        raise ValueError("no name")
    return [call(match[1], _arguments(_GLM_ARGUMENT, match[2], match[1], schemas))]


def _gemma(begin: str, end: str) -> Reader:
    def read(text: str, schemas: Schemas) -> list[Call]:
        match = re.fullmatch(r"call:([\w.\-]+)\s*(\{.*\})", text.strip(), re.DOTALL)
        if match is None:
            raise ValueError("no name and arguments")
        dialect = {"unquoted_keys": True, "string_delims": [[begin, end]]}
        return [call(match[1], parse_content(match[2], "json", dialect))]

    read.__doc__ = f"``call:name{{key:{begin}text{end}, other:1}}``"
    return read


read_gemma = _gemma('<|"|>', '<|"|>')
read_function_gemma = _gemma("<escape>", "<escape>")


def _all(pattern: re.Pattern[str], text: str, *, empty: bool = False) -> Iterator[re.Match[str]]:
    """Matches one behind another, with nothing between them and nothing left. Raises ValueError."""
    text, at = text.strip(), 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            raise ValueError(f"no call: {text[at : at + 40]!r}")
        yield match
        at = match.end()
    if not at and not empty:
        raise ValueError("no call at all")


def _arguments(pattern: re.Pattern[str], text: str, name: str, schemas: Schemas) -> dict[str, Any]:
    return {
        match["key"].strip(): typed(match["value"], name, match["key"].strip(), schemas)
        for match in _all(pattern, text, empty=True)
    }


def typed(value: str, name: str, key: str, schemas: Schemas) -> Any:
    """A value that was written as bare text, by what the tool says of it: text where it may be
    text and nothing else fits, JSON where it is.
    """
    schema = (schemas.get(name.strip(), {}).get("properties") or {}).get(key)
    types = types_of(schema)
    try:
        said = load(value)
    except ValueError:
        return value
    if types is None:
        return said
    return said if any(_is(said, kind) for kind in types - {"string"}) else value


KINDS = ("string", "integer", "number", "boolean", "null", "object", "array")
"""Types of JSON schema."""


def types_of(schema: Any) -> frozenset[str] | None:
    """Types that a schema names; None where it names none."""
    if not isinstance(schema, dict):
        return None
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named or ())
    if named is None and isinstance(schema.get("enum"), list):
        found = {kind for one in schema["enum"] for kind in KINDS if _is(one, kind)}
    for union in ("anyOf", "oneOf"):
        for one in schema.get(union) or ():
            found |= types_of(one) or set()
    return frozenset(found) or None


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if value is None:
        return kind == "null"
    if isinstance(value, int):
        return kind in ("integer", "number")
    if isinstance(value, float):
        return kind == "number" or (kind == "integer" and value.is_integer())
    return isinstance(value, {"object": dict, "array": list, "string": str}.get(kind, ()))
