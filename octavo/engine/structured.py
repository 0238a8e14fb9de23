"""From what an output must look like to a grammar over the model's tokens.

Owns ``Grammars``: compiling, and saying of what cannot be compiled why. Knows llguidance's forms of
grammars; knows no requests and no steps.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from types import MappingProxyType

from llguidance import LLMatcher, grammar_from

from octavo.base import ConfigError
from octavo.engine.text import Tokenizer
from octavo.runner.masks import Matcher, Vocabulary
from octavo.sched.structured import StructuredOutputs

KEPT = 64
"""Compiled grammars that are kept for whoever asks for the same again."""

MAX_GRAMMAR = 1 << 20
"""Most characters of a grammar: compiling takes time, and whoever else comes waits for it."""

WHITESPACE = r"[ \t\n\r]{0,64}"
"""Between the tokens of JSON: enough to indent, and bounded, or a model may write blanks for
ever.
"""

BOOLEAN = MappingProxyType({"true": "{}", "false": '{"enum": []}'})
"""Schemas that are no objects, as objects."""

SAYS = 300
"""Most characters that a message repeats of what the compiler says."""


class Grammars:
    """The grammars of one model. tokenizer: None where prompts are token ids, so that nothing can
    be constrained.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size
        self._ends = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, wanted: StructuredOutputs) -> Matcher:
        """A constraint for a new output. Raises ConfigError naming the field, and what of it is not
        supported.
        """
        grammar = grammar_of(wanted)
        with self._lock:
            if grammar not in self._kept:
                try:
                    self._kept[grammar] = Matcher(self._known(wanted.field), grammar)
                except ConfigError as error:
                    raise ConfigError(
                        f"{wanted.field} cannot be compiled: {_line(error)}"
                    ) from error
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return self._kept[grammar].fork()

    def _known(self, field: str) -> Vocabulary:
        if self._tokenizer is None:
            raise ConfigError("that needs the tokenizer; leave skip_tokenizer_init off")
        if not self._ends:
            raise ConfigError("that needs a model with a token that ends a text")
        if self._vocabulary is None:
            self._vocabulary = vocabulary_of(self._tokenizer, self._size, self._ends)
        return self._vocabulary


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Iterable[int]) -> Vocabulary:
    """The first ``size`` tokens: as many as the model has logits."""

    def encode(text: bytes) -> list[int]:
        return tokenizer.encode(text.decode("utf-8", "replace"), special=False)

    return Vocabulary(
        [tokenizer.token_bytes(token) for token in range(size)],
        special=(token for token in tokenizer.special_token_ids if token < size),
        ends=ends,
        encode=encode,
    )


def grammar_of(wanted: StructuredOutputs) -> str:
    """What llguidance compiles. Raises ConfigError where it is too long, or no grammar at all."""
    body = _body(wanted)
    if wanted.around is None:
        return body
    grammars = json.loads(body)["grammars"]
    first = {"name": "whole", "lark_grammar": wanted.around}
    return json.dumps({"grammars": [first, {**grammars[0], "name": "body"}, *grammars[1:]]})


def _body(wanted: StructuredOutputs) -> str:
    given = wanted.json or wanted.regex or wanted.grammar or json.dumps(wanted.choice)
    if len(str(given)) > MAX_GRAMMAR:
        raise ConfigError(f"{wanted.field} is longer than {MAX_GRAMMAR:,} characters")
    try:
        if wanted.json is not None or wanted.json_object:
            schema = str(wanted.json) if wanted.json is not None else '{"type": "object"}'
            return LLMatcher.grammar_from_json_schema(
                BOOLEAN.get(schema, schema), defaults={"whitespace_pattern": WHITESPACE}
            )
        if wanted.regex is not None:
            return LLMatcher.grammar_from_regex(wanted.regex)
        if wanted.choice is not None:
            return grammar_from("choice", json.dumps(wanted.choice))
        assert wanted.grammar is not None
        return grammar_from("grammar", wanted.grammar)
    except ValueError as error:
        raise ConfigError(f"{wanted.field} cannot be compiled: {_line(error)}") from error


def _line(error: Exception) -> str:
    """What a compiler says, in one line."""
    return " ".join(str(error).split())[:SAYS]
