"""Streaming text: multi-token characters, stop strings across pieces, and the pieces joined are the
whole.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.base import ConfigError
from octavo.engine.text import Detokenizer, StopStrings, TextStream, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and one special token: every character beyond ASCII spans tokens."""
    backend = Backend(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(ALPHABET)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


BYTES = byte_tokenizer()


def stream(token_ids: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    text = TextStream(BYTES, BYTES.encode("prompt "), stops)
    pieces = [text.push([token]) for token in token_ids[:-1] if not text.stopped]
    pieces.append(text.push(token_ids[-1:], last=True))
    assert "".join(pieces) == text.text
    return pieces


@given(st.text(min_size=1, max_size=30))
def test_pieces_joined_are_the_whole(text: str) -> None:
    assert "".join(stream(BYTES.encode(text))) == text


@given(st.lists(st.integers(0, 255), min_size=1, max_size=30))
def test_invalid_bytes_end_as_the_whole_would_show_them(token_ids: list[int]) -> None:
    assert "".join(stream(token_ids)) == BYTES.decode(token_ids)


def test_a_character_appears_with_its_last_token() -> None:
    detokenizer = Detokenizer(BYTES, [])
    assert [detokenizer.push([token]) for token in BYTES.encode("a日b")] == ["a", "", "", "日", "b"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, [])
    assert detokenizer.push(BYTES.encode("a日")[:3]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    end = next(iter(BYTES.eos_token_ids))
    assert "".join(stream([*BYTES.encode("a"), end, *BYTES.encode("b")])) == "ab"


def test_stop_string_is_held_back_then_dropped() -> None:
    assert stream(BYTES.encode("one\n\ntwo"), ("\n\n",))[:4] == ["o", "n", "e", ""]
    assert "".join(stream(BYTES.encode("one\n\ntwo"), ("\n\n",))) == "one"


def test_what_only_began_like_a_stop_string_is_given_out() -> None:
    assert stream(BYTES.encode("a\nb"), ("\n\n",)) == ["a", "", "\nb"]
    assert "".join(stream(BYTES.encode("a\n"), ("\n\n",))) == "a\n"


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_stop_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    expected = text[: min(found)[1]] if found else text
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    cutter = StopStrings(stops)
    given_out = "".join(
        cutter.push(text[start:stop]) for start, stop in zip(borders, borders[1:], strict=False)
    )
    assert given_out + cutter.flush() == expected
    assert cutter.stopped == bool(found)


def test_nothing_is_given_out_that_a_stop_string_would_take_back() -> None:
    cutter = StopStrings(["END"])
    assert [cutter.push(piece) for piece in ("xE", "N", "EN", "D", "y")] == ["x", "", "EN", "", ""]
    assert cutter.stopped


def test_chat_without_template_says_so() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        BYTES.chat([{"role": "user", "content": "hi"}])
