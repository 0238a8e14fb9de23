"""Traffic to be sent: which requests come, when, and what they have in common.

Owns ``TraceRequest`` and the two formats of files: Mooncake's, and a simple one of octavo's
(``docs/simulating.md``). Knows no scheduler, no cache and no clock. Generators of traffic are in
``generate.py``.

Text never matters here, only which tokens are equal. A prompt is a sequence of *pieces*: a piece is
a name and a length, and stands for the first so many tokens that belong to the name. Every name is
given a range of token ids of its own, so tokens are equal if and only if they are the same ones of
the same name.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base import ConfigError, floor_to

MOONCAKE_BLOCK = 512
"""Tokens that one hash id stands for in the traces that were published with Mooncake."""

TOKEN_IDS = 1 << 31
"""Token ids are int32."""

Piece = tuple[Hashable, int]
"""The first so many tokens of a name."""

Tokens = tuple["Piece | np.ndarray", ...]
"""Pieces, and tokens that are given as they are (int32)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceRequest:
    """One request of a trace.

    arrival: seconds since the trace began. output: what it answers, where the trace tells, which a
        later prompt may contain; else None, and ``output_length`` tokens that nobody else has.
    marks: positions in the prompt that its sender announces as worth a resume point.
    """

    prompt: Tokens
    output_length: int
    arrival: float = 0.0
    output: Tokens | None = None
    salt: str = ""
    priority: int = 0
    marks: tuple[int, ...] = ()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return count_tokens(self.prompt)


def count_tokens(tokens: Tokens) -> int:
    """Tokens in pieces and arrays."""
    return sum(len(part) if isinstance(part, np.ndarray) else part[1] for part in tokens)


class Vocabulary:
    """Token ids of all names of a trace, and of answers that nobody else has.

    Raises ConfigError where the trace has more different tokens than there are ids.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        longest: dict[Hashable, int] = {}
        first = 0
        for part in (part for request in requests for part in _parts(request)):
            if isinstance(part, np.ndarray):
                first = max(first, int(part.max(initial=-1)) + 1)
            else:
                longest[part[0]] = max(part[1], longest.get(part[0], 0))
        self._first: dict[Hashable, int] = {}
        for name, length in longest.items():
            self._first[name] = first
            first += length
        self._answers = TOKEN_IDS - len(requests)
        if first > self._answers:
            raise ConfigError(
                f"trace: {first:,} different tokens and {len(requests):,} answers are more than"
                f" there are token ids ({TOKEN_IDS:,}); give fewer requests with --limit"
            )

    def tokens(self, tokens: Tokens) -> np.ndarray:
        """Token ids of pieces, int32."""
        found = [
            part
            if isinstance(part, np.ndarray)
            else np.arange(self._first[part[0]], self._first[part[0]] + part[1], dtype=np.int32)
            for part in tokens
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def answer(self, index: int, request: TraceRequest) -> np.ndarray:
        """Token ids of what request number ``index`` answers, int32."""
        if request.output is not None:
            return self.tokens(request.output)
        return np.full(request.output_length, self._answers + index, np.int32)


def _parts(request: TraceRequest) -> Iterator[Piece | np.ndarray]:
    yield from request.prompt
    yield from request.output or ()


_RUN = 16
"""Tokens of an array that are compared at once."""


class History:
    """What an unlimited cache would have: every prompt, and every answer that the trace tells, from
    its arrival on.
    """

    def __init__(self) -> None:
        # A place is a number that stands for all tokens before it.
        self._places: dict[tuple[Hashable, ...], int] = {}
        self._longest: dict[tuple[int, Hashable], int] = {}

    def match(self, request: TraceRequest) -> int:
        """Tokens of the prompt that were there before."""
        place, tokens = self._places.get((request.salt,), -1), 0
        for name, count in _named(request.prompt):
            known = self._longest.get((place, name), 0)
            tokens += min(known, count)
            place = self._places.get((place, name, count), -1)
            if known < count or place < 0:
                break
        return tokens

    def add(self, request: TraceRequest) -> None:
        """Remember a request. The last token that it answers is never computed."""
        said = request.prompt
        if request.output is not None:
            said = (*said, *request.output)
            said = tuple(_cut(said, count_tokens(said) - 1))
        place = self._places.setdefault((request.salt,), len(self._places))
        for name, count in _named(said):
            self._longest[place, name] = max(count, self._longest.get((place, name), 0))
            place = self._places.setdefault((place, name, count), len(self._places))


def _named(tokens: Tokens) -> Iterator[Piece]:
    """All tokens as pieces. Neighbours that are cuts of one name are left apart."""
    for part in tokens:
        if isinstance(part, np.ndarray):
            for start in range(0, len(part), _RUN):
                run = part[start : start + _RUN]
                yield run.tobytes(), len(run)
        else:
            yield part


# -- files -----------------------------------------------------------------------------------------


def read_trace(
    path: str | Path, *, block_size: int = MOONCAKE_BLOCK, limit: int | None = None
) -> list[TraceRequest]:
    """Requests of a file with one JSON object a line, in either format.

    block_size: tokens of a hash id. limit: most requests to be read. Raises ConfigError naming the
    line and the field.
    """
    requests = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            given = ((n, line) for n, line in enumerate(lines, 1) if line.strip())
            for number, line in islice(given, limit):
                requests.append(_request(line, f"trace {path}, line {number}", block_size))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not text in UTF-8") from error
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    return requests


def align(requests: Iterable[TraceRequest], block_size: int = MOONCAKE_BLOCK) -> list[TraceRequest]:
    """Prompts cut to whole blocks and one token of their own.

    Traces with a hash for every block only know prefixes that end with a block: what really was
    common further on is lost, and resume points at the ends of prompts can never be met. A prompt
    shorter than a block stays.
    """
    made = []
    for index, request in enumerate(requests):
        whole = floor_to(request.prompt_length, block_size)
        if whole:
            own = (("own token", index), 1)
            request = replace(request, prompt=(*_cut(request.prompt, whole), own))
        made.append(request)
    return made


def _cut(tokens: Tokens, count: int) -> Iterator[Piece | np.ndarray]:
    for part in tokens:
        if not count:
            return
        size = len(part) if isinstance(part, np.ndarray) else part[1]
        kept = min(size, count)
        yield part[:kept] if isinstance(part, np.ndarray) else (part[0], kept)
        count -= kept


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The object on one line. ``where`` names it in messages."""

    where: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def fail(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} {problem}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise self.fail(name, f"must be a number of at least 0, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None, least: int = 0) -> int:
        value = self.number(name, default)
        if value != int(value) or value < least:
            raise self.fail(name, f"must be a whole number of at least {least}, not {value!r}")
        return int(value)

    def items(self, name: str) -> list[Any]:
        value = self.fields[name]
        if not isinstance(value, list):
            raise self.fail(name, f"must be a list, not {value!r}")
        return value


def _request(text: str, where: str, block_size: int) -> TraceRequest:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is no JSON object")
    line = _Line(where=where, fields=fields)
    return _mooncake(line, block_size) if "hash_ids" in fields else _own(line)


def _mooncake(line: _Line, block_size: int) -> TraceRequest:
    """``timestamp`` in milliseconds, ``input_length``, ``output_length``, and an id for every
    block of the prompt; equal ids are equal blocks.
    """
    length, ids = line.count("input_length", least=1), line.items("hash_ids")
    prompt: list[Piece] = []
    for start, name in zip(range(0, length, block_size), ids, strict=False):
        if isinstance(name, dict | list):
            raise line.fail("hash_ids", f"must hold numbers or strings, not {name!r}")
        prompt.append((("block", name), min(block_size, length - start)))
    if len(ids) * block_size < length:
        prompt.append((("untold", line.where), length - len(ids) * block_size))
    return TraceRequest(
        prompt=tuple(prompt),
        output_length=max(1, line.count("output_length", 1)),
        arrival=line.number("timestamp", 0) / 1000,
    )


_NAMES = frozenset(
    {
        "arrival",
        "tokens",
        "segments",
        "output_tokens",
        "output_segments",
        "output_length",
        "salt",
        "priority",
        "marks",
    }
)


def _own(line: _Line) -> TraceRequest:
    """octavo's own format; see ``docs/simulating.md``."""
    if unknown := sorted(set(line.fields) - _NAMES):
        raise line.fail(unknown[0], f"is not known; known: {', '.join(sorted(_NAMES))}")
    prompt = _tokens(line, "")
    if prompt is None or not count_tokens(prompt):
        raise line.fail("tokens", "or segments must give a prompt of at least one token")
    output = _tokens(line, "output_")
    told = None if output is None else count_tokens(output)
    length = line.count("output_length", told if told is not None else 1, least=1)
    if told is not None and told != length:
        raise line.fail("output_length", f"is {length}, and the output given has {told} tokens")
    salt, priority = line.fields.get("salt", ""), line.fields.get("priority", 0)
    if not isinstance(salt, str):
        raise line.fail("salt", f"must be a string, not {salt!r}")
    if not isinstance(priority, int):
        raise line.fail("priority", f"must be a whole number, not {priority!r}")
    marks = line.items("marks") if "marks" in line.fields else []
    if not all(isinstance(mark, int) and mark >= 1 for mark in marks):
        raise line.fail("marks", f"must be positions of at least 1, not {marks!r}")
    return TraceRequest(
        prompt=prompt,
        output_length=length,
        arrival=line.number("arrival", 0),
        output=output,
        salt=salt,
        priority=priority,
        marks=tuple(marks),
    )


def _tokens(line: _Line, prefix: str) -> Tokens | None:
    """What ``tokens`` or ``segments`` say, or ``None`` where neither is there."""
    tokens, segments = f"{prefix}tokens", f"{prefix}segments"
    if tokens in line.fields and segments in line.fields:
        raise line.fail(tokens, f"and {segments} are both given: one of them is enough")
    if tokens in line.fields:
        ids = line.items(tokens)
        if not all(type(each) is int and 0 <= each < TOKEN_IDS for each in ids):
            raise line.fail(tokens, f"must be token ids from 0 to {TOKEN_IDS - 1:,}")
        return (np.array(ids, np.int32),)
    if segments not in line.fields:
        return None
    pieces: list[Piece] = []
    for each in line.items(segments):
        match each:
            case [str() | int() as name, int() as count] if count >= 1:
                pieces.append((("segment", name), count))
            case _:
                raise line.fail(
                    segments, f"must be pairs of a name and a number of tokens, not {each!r}"
                )
    return tuple(pieces)
