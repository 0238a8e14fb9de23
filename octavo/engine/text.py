"""Between text and token ids: encoding, streaming detokenization, stop strings.

Owns ``Tokenizer`` (a Transformers tokenizer behind a few methods), ``Detokenizer`` and
``StopStrings``. Knows no scheduler and no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xxhash import xxh3_128_hexdigest

from octavo.base import ConfigError
from octavo.engine.chat import NO_ARGUMENTS, ChatTemplate, Mark, Messages
from octavo.engine.source import ModelSource, cache_home

REPLACEMENT = "\ufffd"
"""What an unfinished UTF-8 sequence decodes to."""

CONTEXT = 6
"""Tokens in front of new ones that decoding sees: sequence-start rules (a stripped space) then
apply to the prompt's end.
"""


class Tokenizer:
    """A model's tokenizer. Encoding and decoding are pure: equal input, equal output.

    shown: special tokens whose names are part of decoded text; the others have no text.
    """

    def __init__(self, backend: Any, *, shown: frozenset[int] = frozenset()) -> None:
        self.backend, self._shown = backend, shown

    def showing(self, shown: frozenset[int]) -> Tokenizer:
        """The same tokenizer, whose text has these special tokens in it."""
        return Tokenizer(self.backend, shown=shown) if shown else self

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that the tokenizer itself calls end of sequence."""
        eos = self.backend.eos_token_id
        return frozenset() if eos is None else frozenset([eos])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt, with the model's own start token where it has one, and once also
        where the text spells it; without it where not ``special``.
        """
        ids = list(self.backend(text, add_special_tokens=special).input_ids)
        opening = list(self.opening)
        twice = special and opening and ids[: 2 * len(opening)] == 2 * opening
        return ids[len(opening) :] if twice else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens have none, unless they are shown; spaces are left as
        they are.
        """
        ids = list(token_ids)
        if self._shown:
            hidden = self.special_token_ids - self._shown
            ids = [token for token in ids if token not in hidden]
        return str(
            self.backend.decode(
                ids, skip_special_tokens=not self._shown, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, which need not be whole characters; a special token stands
        for its name.
        """
        piece = self.backend.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return str(piece).encode()
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        if self._alphabet:
            return bytes(self._alphabet[symbol] for symbol in piece)
        return str(piece).replace("\u2581", " ").encode()

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text, and that ``decode`` leaves out."""
        return frozenset(self.backend.all_special_ids) | {
            token for token, added in self.backend.added_tokens_decoder.items() if added.special
        }

    @cached_property
    def _added(self) -> frozenset[int]:
        """Ids of special tokens and other words that were added to the vocabulary as they are."""
        return frozenset(self.backend.added_tokens_decoder)

    @cached_property
    def _alphabet(self) -> Mapping[str, int]:
        """Byte of every symbol, where the vocabulary spells bytes as symbols; else empty."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        if not self.backend.is_fast or "ByteLevel" not in repr(
            self.backend.backend_tokenizer.decoder
        ):
            return {}
        return {symbol: byte for byte, symbol in bytes_to_unicode().items()}

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which a model may lack."""
        return ChatTemplate(self.backend)

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Tokens that the model wants at the beginning of every prompt: mostly its start token, or
        none.
        """
        bare, whole = (
            list(self.backend("a", add_special_tokens=special).input_ids)
            for special in (False, True)
        )
        places = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return tuple(whole[: next(places, 0)])

    def chat(self, messages: Messages, *, arguments: Mapping[str, Any] = NO_ARGUMENTS) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. Raises ConfigError where the
        model has no template.
        """
        return self.chat_prompt(messages, arguments=arguments)[0]

    def chat_prompt(
        self,
        messages: Messages,
        *,
        marks: Sequence[Mark] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and for every mark the number of them that what comes after
        it cannot change.

        A conversation begins as every prompt of the model does, whether or not its template writes
        the start token. marks: (message, characters of its content) that will come again.
        add_generation_prompt: end where the assistant is to speak. continue_final_message: end
        within the last message. arguments: variables of the template. tools: what the model may
        call. Raises what
        ``ChatTemplate.tokens`` raises.
        """
        ids, ends = self.template.tokens(
            messages,
            marks=marks,
            arguments=arguments,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        first = next((n for n, token in enumerate(ids) if not self.decode([token]).isspace()), 0)
        if tuple(ids[first : first + len(self.opening)]) == self.opening:
            return ids, ends
        return [*self.opening, *ids], [len(self.opening) + end for end in ends]


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer beside the weights, or the one inside a GGUF file. Raises ConfigError where
    there is none.
    """
    from transformers import AutoTokenizer

    try:
        return Tokenizer(
            _from_gguf(source.path) if source.gguf else AutoTokenizer.from_pretrained(source.path)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer could be read from {source.path}: {error}") from error


def _from_gguf(path: Path) -> Any:
    """The tokenizer inside a GGUF file. Making it takes seconds, so it is kept for the next start,
    where that is possible.

    AutoTokenizer would give the same, after reading the whole vocabulary twice more to learn the
    model type.
    """
    import transformers

    about = path.stat()
    key = xxh3_128_hexdigest(
        f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {transformers.__version__}".encode()
    )
    kept, fast = cache_home() / "tokenizers" / key, transformers.PreTrainedTokenizerFast
    if (kept / "tokenizer.json").is_file():
        return fast.from_pretrained(kept)
    made = fast.from_pretrained(path.parent, gguf_file=path.name)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent) as draft:
            made.save_pretrained(Path(draft) / key)
            (Path(draft) / key).rename(kept)
    return made


class Detokenizer:
    """Text of a growing sequence, piece by piece; the pieces joined are the text of the whole.

    A character that several tokens spell appears with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-CONTEXT:])
        # Tokens before _read have been turned into text; decoding starts at _start so that their
        # context is seen.
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
        """Text of what is still incomplete, with replacement characters, as decoding the whole
        would show it.
        """
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        after = self._tokenizer.decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Cuts a stream of text at the first stop string, and never lets go of text that may still turn
    out to be one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string, ``matched``, was found."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Append text; return what is certainly before any stop string."""
        if self.stopped:
            return ""
        self._held += text
        # The one that is complete first ends the text, however it was cut into pieces.
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            _, keep, self.matched = min(found)
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

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stops: Sequence[str]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        self._stops = StopStrings(stops)
        self.text = ""

    @property
    def matched(self) -> str | None:
        """The stop string that was found: the request is to end, and later tokens say nothing."""
        return self._stops.matched

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int], *, last: bool = False, may_stop: bool = True) -> str:
        """Append tokens and return new text; ``last`` releases everything that was held back.

        may_stop: False while it is too early to look for stop strings; none is found in that text
            later either.
        """
        piece = self._detokenizer.push(token_ids)
        if may_stop:
            piece = self._stops.push(piece)
        if last and not self.stopped:
            piece += self._stops.push(self._detokenizer.flush())
            piece += self._stops.flush()
        self.text += piece
        return piece
