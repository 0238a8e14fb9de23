"""What an answer must look like: a schema, an expression, a choice or a grammar. Plain data.

Owns ``StructuredOutputs`` (what a request asks for) and ``Constraint`` (what becomes of it for one
continuation). Knows no tokens' bytes and no library: ``engine/structured.py`` compiles,
``runner/masks.py`` computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.base import ConfigError

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Fields of which exactly one says what the output looks like."""


class Constraint(Protocol):
    """Which tokens may follow an output: a function of the output's tokens and of nothing else.

    One for every continuation. What an implementation remembers of the tokens it saw last is for
    speed and may be wrong at any time: it compares, and goes back where it has to.
    """

    def fork(self) -> Constraint:
        """The same constraint for another continuation of the prompt."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the output of a request must look like, in the words vLLM's users know. One of:

    json: a JSON schema, as a mapping or as text. json_object: True for any JSON object.
    regex: an expression in Rust's syntax that the whole output matches.
    choice: texts, one of which the output is.
    grammar: a context-free grammar, in Lark's form with a rule ``start``, or in GBNF's with a
        rule ``root``.
    around: a grammar in Lark's form in which ``@body`` stands for that: for what a reasoning model
        thinks first, or may say instead.
    field: the request's field that it came in, for messages.

    Raises ConfigError where none or several are given, or one is empty or of another type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    around: str | None = None
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        # A schema of False is one that nothing satisfies.
        given = ["json", *given] if self.json is False else given
        if len(given) != 1:
            said = f"not {' and '.join(given)}" if given else "and none is given"
            raise ConfigError(f"{self.field} takes one of {', '.join(KINDS)}, {said}")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema(self.json))
        if self.choice is not None:
            wrong = isinstance(self.choice, str) or not all(
                isinstance(text, str) for text in self.choice
            )
            if wrong or not self.choice or not all(self.choice):
                raise ConfigError(f"{self.field}: choice must be a list of texts, none of it empty")
            object.__setattr__(self, "choice", tuple(self.choice))
        for kind in ("regex", "grammar"):
            text = getattr(self, kind)
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"{self.field}: {kind} must be a text that is not empty")

    def _schema(self, given: str | Mapping[str, Any] | bool) -> str:
        try:
            schema = json.loads(given) if isinstance(given, str) else given
            if not isinstance(schema, Mapping | bool):
                raise TypeError(f"it is a {type(schema).__name__}")
            # Of equal schemas the same text, so that they are compiled once. The order of keys is
            # kept: it is the order of the properties in the output.
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.field}: json must be a JSON schema, an object or a boolean: {error}"
            ) from error
