"""An answer cut into thoughts, text and calls while it comes.

Owns ``AnswerParser``. Where regions begin and end is found by Transformers' streaming parser; a
call is given when it is whole, and one that is none comes back as the text that it is. Knows a
format and the tools; no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from octavo.base import ConfigError
from octavo.server.answers.calls import Call, Schemas, call
from octavo.server.answers.formats import NEVER, Format

CONTENT, THOUGHT, CALLS = "content", "reasoning_content", "tool_calls"
OWN_THOUGHTS = (THOUGHT, "thinking", "reasoning")
"""Names that response templates have for thoughts."""

OPEN, CLOSE = "octavo_open", "octavo_close"
"""Names of groups that keep a region's markers, for calls that turn out to be none."""


CUT = "\0cut\0"
"""Said to a parser where an answer ends within calls: an expression for the end itself would match
before it is known whether a marker is coming.
"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is new of an answer: text, thought text, or a whole call; one of them."""

    text: str = ""
    thought: str = ""
    call: Call | None = None


class AnswerParser:
    """Reads one answer. schemas: the tools that may be called; None where none may, and whatever
    looks like a call is text. thinking: the prompt ends where thoughts begin. many: False leaves
    out all calls but the first.

    The pieces of all ``push`` and of ``finish`` are the same however the text is cut, but for
    where text is parted.
    """

    def __init__(
        self, form: Format, schemas: Schemas | None, *, thinking: bool = False, many: bool = True
    ) -> None:
        self._form, self._schemas = form, schemas or {}
        self._left = None if many else 1
        template = _template(_key(form), schemas is not None)
        prefix = form.thoughts[0] if thinking and form.thoughts else ""
        self._parser = ResponseParser(template, prefix=prefix)
        # Blanks between regions are no text; those at an answer's beginning and end are.
        self._blank, self._calling = thinking, schemas is not None

    def push(self, text: str) -> Iterator[Piece]:
        """More of the answer."""
        if text:
            yield from self._pieces(self._parser.feed(text))

    def finish(self) -> Iterator[Piece]:
        """There is no more."""
        if self._calling:
            yield from self._pieces(self._parser.feed(CUT))
        yield from self._pieces(self._parser.finalize()[1])

    def _pieces(self, events: list[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            kind, name = event["type"], event["field"]
            if name == CALLS:
                if kind == "region_close":
                    yield from self._calls(event["value"])
            elif kind == "region_open" and not name.startswith(CONTENT):
                self._blank = True
            elif kind == "region_close":
                self._blank = self._blank or name != CONTENT
            elif kind == "region_chunk":
                text = event["text"].replace(CUT, "")
                if self._blank:
                    text = text.lstrip()
                    self._blank = not text
                if text:
                    thought = name in OWN_THOUGHTS
                    yield Piece(thought=text) if thought else Piece(text=text)

    def _calls(self, region: Mapping[str, str]) -> Iterator[Piece]:
        opened, inside, closed = region[OPEN], region["content"], region[CLOSE].replace(CUT, "")
        try:
            found = self._read(opened, inside, closed)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._blank = False
            yield Piece(text=opened + inside + closed)
            return
        self._blank = True
        for one in found[: self._left]:
            yield Piece(call=one)
        self._left = None if self._left is None else max(0, self._left - len(found))

    def _read(self, opened: str, inside: str, closed: str) -> list[Call]:
        if self._form.template is not None:
            return _read_own(self._form.template, opened, inside, closed)
        if self._form.writing == "harmony":
            assert self._form.calls is not None
            match = re.fullmatch(_once(self._form.calls["open_pattern"]), opened)
            if match is None:
                raise ValueError("no name")
            name = next(filter(None, match.groups()), None)
            return [call(name, inside)]
        if self._form.closed and not closed:
            raise ValueError("cut off")
        return self._form.read(inside, self._schemas)


def _read_own(template: Mapping[str, Any], opened: str, inside: str, closed: str) -> list[Call]:
    """Calls as the checkpoint's own response template reads them."""
    field = _loaded(_Frozen(template)).fields[CALLS]
    captures: dict[str, str] = {}
    for pattern, text in ((field.open_re, opened), (field.close_re, closed)):
        if pattern is not None and (match := pattern.fullmatch(text)) is not None:
            captures |= {key: value for key, value in match.groupdict().items() if value}
    said = process_field(inside, field, captures)
    found = []
    for one in said if isinstance(said, list) else [said]:
        function = one.get("function", one)
        found.append(call(function["name"], function["arguments"]))
    if not found:
        raise ValueError("no call at all")
    return found


def _once(pattern: str) -> str:
    """A pattern without names, which may stand in it only once each."""
    return re.sub(r"\(\?P<\w+>", "(", pattern)


class _Frozen:
    """A template as a key."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        self.template = template

    def __hash__(self) -> int:
        return hash(repr(self.template))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.template == other.template


@lru_cache(maxsize=8)
def _loaded(frozen: _Frozen) -> ResponseTemplate:
    return load_response_template(dict(frozen.template))


def _key(form: Format) -> _Frozen:
    if form.template is not None:
        return _Frozen(form.template)
    fields: dict[str, Any] = {CONTENT: {"content": "text"}}
    if form.thoughts is not None:
        opened, closed = map(re.escape, form.thoughts)
        fields[THOUGHT] = {"open_pattern": opened, "close_pattern": rf"\s{{0,16}}{closed}"}
    fields |= {name: dict(region) for name, region in form.regions.items()}
    if form.calls is not None:
        fields[CALLS] = dict(form.calls)
    return _Frozen({"start_anchor": NEVER, "fields": fields})


@lru_cache(maxsize=32)
def _template(frozen: _Frozen, calling: bool) -> ResponseTemplate:
    """A response template whose calls are given with their markers, and unread."""
    given = frozen.template
    fields: dict[str, Any] = {}
    for name, field in given["fields"].items():
        if name == CALLS:
            if calling:
                fields[name] = _unread(field)
        else:
            fields[name] = dict(field)
    return load_response_template({"start_anchor": NEVER, "fields": fields})


def _unread(field: Mapping[str, Any]) -> dict[str, Any]:
    opened, closed = (_once(_pattern(field, side)) for side in ("open", "close"))
    if not opened:
        raise ConfigError("a response template whose calls begin with nothing cannot be read")
    ends = f"{closed}|{CUT}" if closed else CUT
    return {
        "open_pattern": f"(?P<{OPEN}>{opened})",
        "close_pattern": f"(?P<{CLOSE}>{ends})",
        "repeats": True,
        "content": "text",
        "content_args": {"strip": False},
        "transform": {OPEN: f"{{{OPEN}}}", "content": "{content}", CLOSE: f"{{{CLOSE}}}"},
    }


def _pattern(field: Mapping[str, Any], side: str) -> str:
    """One expression for a region's open or close marker, however it is given."""
    if (pattern := field.get(f"{side}_pattern")) is not None:
        return str(pattern)
    given = field.get(side)
    literals = [given] if isinstance(given, str) else list(given or ())
    return "|".join(re.escape(one) for one in sorted(literals, key=len, reverse=True))
