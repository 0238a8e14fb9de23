"""Between text and token ids: encoding, streaming detokenization, stop strings.

Owns ``Tokenizer`` (a Transformers tokenizer behind five methods), ``Detokenizer`` and ``StopStrings``. Knows no scheduler and
no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.base import ConfigError
from octavo.engine.source import ModelSource

REPLACEMENT = "\ufffd"
"""What an unfinished UTF-8 sequence decodes to."""

CONTEXT = 6
"""Tokens in front of new ones that decoding sees: sequence-start rules (a stripped space) then apply to the prompt's end."""


class Tokenizer:
    """A model's tokenizer. Encoding and decoding are pure: equal input, equal output."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that the tokenizer itself calls end of sequence."""
        eos = self.backend.eos_token_id
        return frozenset() if eos is None else frozenset([eos])

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the model's own start token where it has one."""
        return list(self.backend(text).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens have none; spaces are left as they are."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ConfigError where the model has no template."""
        if not self.backend.chat_template:
            raise ConfigError("this model has no chat template; use --no-chat, or give the prompt as plain text")
        text = self.backend.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self.backend(text, add_special_tokens=False).input_ids)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer beside the weights, or the one inside a GGUF file. Raises ConfigError where there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if source.gguf:
            # AutoTokenizer would give the same, after reading the whole vocabulary twice more to learn the model type.
            return Tokenizer(PreTrainedTokenizerFast.from_pretrained(source.path.parent, gguf_file=source.path.name))
        return Tokenizer(AutoTokenizer.from_pretrained(source.path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer could be read from {source.path}: {error}") from error


class Detokenizer:
    """Text of a growing sequence, piece by piece; the pieces joined are the text of the whole.

    A character that several tokens spell appears with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-CONTEXT:])
        # Tokens before _read have been turned into text; decoding starts at _start so that their context is seen.
        self._start = 0
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that they complete."""
        pieces = []
        for token in token_ids:
            self._ids.append(token)
            pieces.append(self._advance(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        """Text of what is still incomplete, with replacement characters, as decoding the whole would show it."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Cuts a stream of text at the first stop string, and never lets go of text that may still turn out to be one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Append text; return what is certainly before any stop string. ``stopped`` is True once one was found."""
        if self.stopped:
            return ""
        self._held += text
        # The one that is complete first ends the text, however it was cut into pieces.
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            keep = min(found)[1]
        else:
            keep = len(self._held) - self._possible()
        free, self._held = self._held[:keep], "" if self.stopped else self._held[keep:]
        return free

    def flush(self) -> str:
        """The text held back, when nothing more will come."""
        free, self._held = self._held, ""
        return free

    def _possible(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """A request's output as text: detokenized and cut at stop strings."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        self._stops = StopStrings(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: the request is to end, and later tokens say nothing."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Append tokens and return new text; ``last`` releases everything that was held back."""
        piece = self._stops.push(self._detokenizer.push(token_ids))
        if last and not self.stopped:
            piece += self._stops.push(self._detokenizer.flush())
            piece += self._stops.flush()
        self.text += piece
        return piece
