"""What clients add to their requests: what cannot change the answer is accepted, what would is
refused by name and with the way out, and null is absent at every level.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server import fields
from octavo.server.app import create_app
from octavo.server.requests import ChatRequest, CompletionRequest, Message, TokenizeRequest
from tests.server.fakes import FakeEngine, serving

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
USER = {"role": "user", "content": "a"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "a"},
    TOKENIZE: {"messages": [USER]},
}


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[FakeEngine, httpx2.Client]]:
    engine = FakeEngine()
    with serving(create_app(engine)) as url, httpx2.Client(base_url=url) as client:  # type: ignore[arg-type]
        yield engine, client


@pytest.fixture
def engine(started: tuple[FakeEngine, httpx2.Client]) -> FakeEngine:
    return started[0]


@pytest.fixture
def client(started: tuple[FakeEngine, httpx2.Client]) -> httpx2.Client:
    return started[1]


def post(client: httpx2.Client, path: str, **more: Any) -> httpx2.Response:
    # json.dumps writes what clients of other languages may send: lone surrogates as escapes.
    content = json.dumps({**GOOD[path], **more})
    return client.post(path, content=content, headers={"content-type": "application/json"})


def refused(client: httpx2.Client, path: str, **more: Any) -> dict[str, Any]:
    response = post(client, path, **more)
    assert response.status_code == 400, response.text
    return response.json()["error"]


# -- absent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
def test_null_is_absent_for_every_field(client: httpx2.Client, path: str) -> None:
    model = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, TOKENIZE: TokenizeRequest}[path]
    names = {*model.model_fields, *fields.CHAT, *fields.HARMLESS, "anything"} - {*GOOD[path]}
    assert post(client, path, **dict.fromkeys(names)).status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"5": None}},
        {"stream_options": {"include_usage": None, "x": None}},
        {"stop": [None, "z", ""]},
        {"stop": ""},
        {"stop": []},
        {"stop_token_ids": [None, 7]},
        {"logprobs": False},
        {"prompt_logprobs": False},
        {"tools": [], "functions": [], "tool_choice": "auto", "response_format": {}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_as_good_as_absent(client: httpx2.Client, path: str, more: dict[str, Any]) -> None:
    assert post(client, path, **more).status_code == 200


def test_nulls_and_empties_within_messages(client: httpx2.Client, engine: FakeEngine) -> None:
    absent: dict[str, Any] = dict.fromkeys(
        {*Message.model_fields, *fields.MESSAGE, "annotations", "x"} - {"role"}
    )
    part = {"type": "text", "text": "b", "cache_control": None, "image_url": None, "x": None}
    messages = [
        {**absent, "role": "user", "content": [None, part, None]},
        {**absent, "role": "assistant"},
        {**absent, "role": "assistant", "refusal": "no"},
        {**absent, "role": "user", "content": [], "tool_calls": [], "annotations": []},
    ]
    assert post(client, CHAT, messages=messages).status_code == 200
    prompt = engine.tokenizer.decode(engine.calls[-1][1])
    assert prompt == "[user]b\n[assistant]\n[assistant]no\n[user]\n[assistant]"


def test_a_client_sends_back_what_it_got(client: httpx2.Client, engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as asks:
        messages: list[Any] = [USER]
        for _ in range(3):
            answer = asks.chat.completions.create(model="fake", messages=messages)
            messages += [answer.choices[0].message.model_dump(), USER]
    assert len(messages) == 7
    assert engine.tokenizer.decode(engine.calls[-1][1]).count("[assistant]") == 3


def test_without_content_only_an_assistant_may_speak(client: httpx2.Client) -> None:
    error = refused(client, CHAT, messages=[{"role": "user", "content": None}])
    assert (error["param"], error["message"]) == (
        "messages[0].content",
        "messages[0].content is missing",
    )


# -- spellings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_tokens": 7.0}, ("max_tokens", 7)),
        ({"max_tokens": "7"}, ("max_tokens", 7)),
        ({"max_tokens": 10**30}, ("max_tokens", 2**31 - 1)),
        ({"max_completion_tokens": " 7 "}, ("max_tokens", 7)),
        ({"max_tokens": -1}, ("max_tokens", None)),
        ({"temperature": "0.5"}, ("temperature", 0.5)),
        ({"temperature": "1e-1"}, ("temperature", 0.1)),
        ({"top_p": 0}, ("top_p", 0)),
        ({"top_k": 40.0}, ("top_k", 40)),
        ({"top_k": "-1"}, ("top_k", -1)),
        ({"n": 2.0}, ("n", 2)),
        ({"seed": "12"}, ("seed", 12)),
        ({"logit_bias": {"5": "-1.5"}}, ("logit_bias", {5: -1.5})),
        ({"ignore_eos": 1}, ("ignore_eos", True)),
        ({"ignore_eos": "false"}, ("ignore_eos", False)),
        ({"min_tokens": "0"}, ("min_tokens", 0)),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_numbers_and_flags_in_other_spellings(
    client: httpx2.Client,
    engine: FakeEngine,
    path: str,
    more: dict[str, Any],
    expected: tuple[str, Any],
) -> None:
    assert post(client, path, **more).status_code == 200
    name, value = expected
    assert getattr(engine.calls[-1][2], name) == value


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": True},
        {"max_tokens": "many"},
        {"max_tokens": "1,000"},
        {"max_tokens": "٣"},
        {"max_tokens": 1e400},
        {"max_tokens": -2},
        {"temperature": "nan"},
        {"temperature": True},
        {"temperature": "0x1"},
        {"n": "2.5"},
        {"stream": 2},
        {"stream": "yes"},
        {"seed": "1e3"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_number_or_flag(client: httpx2.Client, path: str, more: dict[str, Any]) -> None:
    assert refused(client, path, **more)["param"] == next(iter(more))


def test_logprobs_of_a_chat_is_no_count(client: httpx2.Client) -> None:
    for value in (1, "true"):
        assert refused(client, CHAT, logprobs=value)["param"] == "logprobs"
    assert post(client, CHAT, logprobs=False, top_logprobs=0).status_code == 200


# -- fields that octavo does not have --------------------------------------------------------------


@pytest.mark.parametrize("value", [True, 5, "x", [1], {"a": [None, {"b": "c"}]}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
def test_harmless_fields_may_have_any_value(
    client: httpx2.Client, path: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    names = fields.HARMLESS - {
        *("add_special_tokens", "chat_template_kwargs", "reasoning_effort", "parallel_tool_calls")
    }
    assert post(client, path, **dict.fromkeys(names, value)).status_code == 200
    assert not [record for record in caplog.records if record.name == fields.LOG.name]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_would_change_the_answer_is_refused_by_name(client: httpx2.Client, path: str) -> None:
    for name, entry in {CHAT: fields.CHAT, COMPLETIONS: fields.COMPLETION}[path].items():
        error = refused(client, path, **{name: entry.asks[0] if entry.asks else ["something"]})
        assert error["param"] == name
        assert error["message"] == f"{name} is not supported: {entry.says}"
        assert error["code"] == "unsupported_parameter"
        for value in entry.but:
            assert post(client, path, **{name: value}).status_code == 200


@pytest.mark.parametrize(
    ("path", "more", "param", "message"),
    [
        (CHAT, {"enable_thinking": False}, "enable_thinking", "chat_template_kwargs"),
        (CHAT, {"do_sample": False}, "do_sample", "temperature: 0"),
        (CHAT, {"echo": True}, "echo", "completions have echo"),
        (CHAT, {"lora_name": "mine"}, "lora_name", "LoRA adapters are not supported yet"),
        (CHAT, {"images": ["x"]}, "images", "images are not supported yet"),
        (COMPLETIONS, {"max_new_tokens": 5}, "max_new_tokens", "send max_tokens"),
        (COMPLETIONS, {"top_logprobs": 5}, "top_logprobs", "logprobs: N"),
        (COMPLETIONS, {"tools": [{"type": "function"}]}, "tools", "/v1/chat/completions"),
        (COMPLETIONS, {"extra_body": {"top_k": 1}}, "extra_body", "Python client"),
        (COMPLETIONS, {"messages": [USER]}, "messages", "/v1/chat/completions"),
        (TOKENIZE, {"functions": [{"name": "f"}]}, "functions", "send tools"),
        (COMPLETIONS, {"maxTokens": 5}, "maxTokens", "did you mean max_tokens?"),
        (COMPLETIONS, {"temprature": 0}, "temprature", "did you mean temperature?"),
        (COMPLETIONS, {"top-p": 0.5}, "top-p", "did you mean top_p?"),
        (
            CHAT,
            {"messages": [{**USER, "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "only an assistant calls tools",
        ),
        (
            CHAT,
            {"messages": [USER, {**USER, "images": ["x"]}]},
            "messages[1].images",
            "images are not supported yet",
        ),
        (
            CHAT,
            {"messages": [{**USER, "content": [{"type": "audio", "data": {}}]}]},
            "messages[0].content[0].type",
            "reads and writes text only",
        ),
        (
            CHAT,
            {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
            "images are not supported yet",
        ),
        (
            CHAT,
            {"messages": [{**USER, "content": [{"type": "text", "text": "a", "image_url": "x"}]}]},
            "messages[0].content[0].image_url",
            "images are not supported yet",
        ),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, None, "max_completion_tokens 6"),
        (COMPLETIONS, {"max_tokens": 5, "max_completion_tokens": -1}, None, "max_tokens 5"),
        (
            CHAT,
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "tokenize is no variable of the template",
        ),
        (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs", "valid dictionary"),
    ],
)
def test_refusals_say_what_to_send(
    client: httpx2.Client, path: str, more: dict[str, Any], param: str | None, message: str
) -> None:
    error = refused(client, path, **more)
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


def test_a_misspelt_field_of_a_message(client: httpx2.Client) -> None:
    error = refused(client, CHAT, messages=[{**USER, "names": "x"}])
    assert (
        error["message"] == "messages[0].names is not a field of this request; did you mean name?"
    )


def test_unknown_names_are_told_once_escaped_and_not_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = "line\n\x1b[31mred\u2028é" + "x" * 500
    with (
        serving(create_app(FakeEngine())) as url,  # type: ignore[arg-type]
        httpx2.Client(base_url=url) as client,
        caplog.at_level(logging.WARNING, logger=fields.LOG.name),
    ):
        for _ in range(3):
            message = {**USER, "mood": 1, "content": [{"type": "text", "text": "a", "tone": 2}]}
            assert post(client, CHAT, messages=[message, message], shiny=3).status_code == 200
            assert post(client, COMPLETIONS, **{odd: 4, "shiny": 5}).status_code == 200
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 4
        for name in ("mood", "tone", "shiny", r"line\n\x1b[31mred\u2028\xe9x"):
            assert sum(f"field '{name}" in line for line in told) == 1
        assert all(line.isascii() and line.isprintable() and len(line) < 200 for line in told)
        for start in range(0, 300, 50):
            many = {f"q{number}z{number}": 1 for number in range(start, start + 50)}
            assert post(client, COMPLETIONS, **many).status_code == 200
    assert len(caplog.records) == fields.MAX_NOTICES + 1
    assert caplog.records[-1].getMessage() == "100 unknown fields; no more are told of"


# -- texts -----------------------------------------------------------------------------------------

BROKEN = "a\ud800b"


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"messages": [{**USER, "name": BROKEN}]}, "messages[0].name"),
        (CHAT, {"messages": [USER, {**USER, "content": BROKEN}]}, "messages[1].content"),
        (
            CHAT,
            {"messages": [{**USER, "content": [{"type": "text", "text": BROKEN}]}]},
            "messages[0].content[0].text",
        ),
        (CHAT, {"messages": [{**USER, "refusal": BROKEN}]}, "messages[0].refusal"),
        (CHAT, {"user": BROKEN}, "user"),
        (CHAT, {"metadata": {"a": {"b": [1, BROKEN]}}}, "metadata.a.b[1]"),
        (CHAT, {"metadata": {BROKEN: 1}}, "metadata"),
        (CHAT, {"chat_template_kwargs": {"x": [BROKEN]}}, "chat_template_kwargs.x[0]"),
        (CHAT, {"reasoning_effort": BROKEN}, "reasoning_effort"),
        (CHAT, {"stop": ["a", BROKEN]}, "stop[1]"),
        (CHAT, {"cache_salt": BROKEN}, "cache_salt"),
        (CHAT, {"model": BROKEN}, "model"),
        (COMPLETIONS, {"prompt": ["a", BROKEN]}, "prompt[1]"),
        (COMPLETIONS, {"unknown": BROKEN}, "unknown"),
        (TOKENIZE, {"messages": [{**USER, "name": BROKEN}]}, "messages[0].name"),
    ],
)
def test_what_is_no_text_is_400_at_every_level(
    client: httpx2.Client, path: str, more: dict[str, Any], param: str
) -> None:
    error = refused(client, path, **more)
    assert error["param"] == param
    assert "lone surrogate" in error["message"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=()), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=()), max_size=4), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(value=JSON)
def test_a_text_is_refused_exactly_where_it_cannot_be_written(value: Any) -> None:
    body = {"prompt": "a", "metadata": value}
    try:
        json.dumps(body, ensure_ascii=False).encode()
        writable = True
    except UnicodeEncodeError:
        writable = False
    try:
        CompletionRequest.model_validate(body)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == writable


# -- what templates are told -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "-- "),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "False-- "),
        ({"chat_template_kwargs": {"enable_thinking": None, "other": 1}}, "-- "),
        ({"reasoning_effort": "high"}, "--high "),
        ({"reasoning_effort": "none"}, "False-False-none "),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "True-False-none ",
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "--low "),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_template_arguments_reach_the_template(
    client: httpx2.Client, engine: FakeEngine, path: str, more: dict[str, Any], expected: str
) -> None:
    template = engine.tokenizer.backend.chat_template
    engine.tokenizer.backend.chat_template = (
        "{{ enable_thinking }}-{{ thinking }}-{{ reasoning_effort }} {{ messages[0]['content'] }}"
    )
    try:
        response = post(client, path, **more)
    finally:
        engine.tokenizer.backend.chat_template = template
    assert response.status_code == 200, response.text
    ids = response.json()["tokens"] if path == TOKENIZE else engine.calls[-1][1]
    assert engine.tokenizer.decode(ids) == f"{expected}a"


def test_reasoning_of_earlier_turns_reaches_the_template(
    client: httpx2.Client, engine: FakeEngine
) -> None:
    template = engine.tokenizer.backend.chat_template
    engine.tokenizer.backend.chat_template = (
        "{% for m in messages %}({{ m['reasoning_content'] }}){{ m['content'] }}{% endfor %}"
    )
    said = [
        {"role": "assistant", "content": "a", "reasoning_content": "why"},
        {"role": "assistant", "content": "b", "reasoning": "so"},
        {"role": "assistant", "content": "c", "reasoning_content": None},
    ]
    try:
        assert post(client, CHAT, messages=said).status_code == 200
    finally:
        engine.tokenizer.backend.chat_template = template
    assert engine.tokenizer.decode(engine.calls[-1][1]) == "(why)a(so)b()c"


def test_usage_in_every_chunk(client: httpx2.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = post(client, path, stream=True, stream_options=options, max_tokens=5)
        *chunks, done = [line for line in response.text.split("\n\n") if line]
        usages = [json.loads(chunk.removeprefix("data: "))["usage"] for chunk in chunks]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 5)
        assert done == "data: [DONE]"


def test_what_load_generators_send(client: httpx2.Client, engine: FakeEngine) -> None:
    response = post(
        client,
        COMPLETIONS,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_tokens=8,
        max_completion_tokens=8,
        stop=None,
        ignore_eos=True,
    )
    assert response.status_code == 200
    assert engine.calls[-1][2].max_tokens == 8
    assert post(client, COMPLETIONS, stream_options={"include_usage": True}).status_code == 200
