"""Conversations as tokens, marks in them, and what single tokens stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from octavo.base import ConfigError
from octavo.engine.text import Tokenizer
from tests.engine.test_text import BYTES, byte_tokenizer

LINES = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + (m['content'] | trim) + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Gemma's: what the system says becomes the beginning of the user's message, and vanishes without
# one.
FOLDED = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}{%"
    " set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif"
    " %}{% for m in rest %}<{{ m['role'] }}>{{ (first if loop.first else '') + m['content'] | trim"
    " }}\n{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
TALK = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Hello "},
    {"role": "assistant", "content": "0 is a number"},
    {"role": "user", "content": "Bye"},
)


def chatting(template: str) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.backend.chat_template = template
    return tokenizer


def marked(template: str, marks: list[tuple[int, int]], **options: bool) -> list[str]:
    tokenizer = chatting(template)
    ids, ends = tokenizer.chat_prompt(TALK, marks=marks, **options)
    return [tokenizer.decode(ids[:end]) for end in ends]


def test_chat_is_the_template() -> None:
    tokenizer = chatting(LINES)
    text = "[system]Be kind.\n[user]Hello\n[assistant]0 is a number\n[user]Bye\n"
    assert tokenizer.decode(tokenizer.chat(TALK)) == text + "[assistant]"
    assert tokenizer.decode(tokenizer.chat_prompt(TALK, add_generation_prompt=False)[0]) == text
    ids, marks = tokenizer.chat_prompt(
        TALK, add_generation_prompt=False, continue_final_message=True
    )
    assert (tokenizer.decode(ids), marks) == (text.rstrip("\n"), [])


def test_a_mark_ends_where_another_continuation_would_begin() -> None:
    assert marked(LINES, [(0, 8), (1, 7), (2, 13), (3, 3)]) == [
        "[system]Be kind.\n[user]",
        "[system]Be kind.\n[user]Hello\n[assistant]",
        "[system]Be kind.\n[user]Hello\n[assistant]0 is a number\n[user]",
        "[system]Be kind.\n[user]Hello\n[assistant]0 is a number\n[user]Bye\n",
    ]


def test_a_mark_within_a_message() -> None:
    assert marked(LINES, [(0, 3), (2, 1)]) == [
        "[system]Be ",
        "[system]Be kind.\n[user]Hello\n[assistant]0",
    ]


def test_a_mark_of_a_message_that_stands_in_another() -> None:
    assert marked(FOLDED, [(0, 8)]) == ["<user>Be kind.\n\n"]


def test_a_mark_at_the_end_of_a_message_to_be_continued() -> None:
    (text,) = marked(LINES, [(3, 3)], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("[user]Bye")


def test_what_a_template_refuses_is_said() -> None:
    with pytest.raises(
        ConfigError, match="messages do not suit the model's chat template: roles must alternate"
    ):
        chatting("{{ raise_exception('roles must alternate') }}").chat(TALK)


def test_marks_need_to_know_characters() -> None:
    tokenizer = chatting(LINES)

    class Slow:
        is_fast = False
        chat_template = LINES

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer.backend, name)

    with pytest.raises(ConfigError, match="cache_control needs a tokenizer that knows"):
        Tokenizer(Slow()).chat_prompt(TALK, marks=[(0, 1)])


@given(st.text(max_size=20))
def test_bytes_of_tokens_joined_are_the_text(text: str) -> None:
    assert b"".join(map(BYTES.token_bytes, BYTES.encode(text))) == text.encode()


def test_bytes_of_special_and_unknown_tokens() -> None:
    (end,) = BYTES.eos_token_ids
    assert BYTES.token_bytes(end) == b"<end>"
    assert BYTES.token_bytes(end + 1) == b""


def test_bytes_of_words_with_byte_fallback() -> None:
    names = ["<unk>", "\u2581Hello", "\u2581", "日", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3, 4 + 0xE6)] == [
        b" Hello",
        b" ",
        "日".encode(),
        b"\xe6",
    ]
    text = " 日é"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
