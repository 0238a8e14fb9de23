"""Every way to be wrong, and that the answer is in the OpenAI form, names the field, and is never a
500.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.base import ConfigError, UnsupportedError
from octavo.engine.aio import EngineClosedError, EngineDeadError, QueueFullError, StepFailedError
from octavo.server.app import create_app
from octavo.server.errors import describe
from tests.server.fakes import FakeEngine, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[FakeEngine, httpx2.Client]]:
    engine = FakeEngine()
    with serving(create_app(engine)) as url, httpx2.Client(base_url=url) as client:  # type: ignore[arg-type]
        yield engine, client


@pytest.fixture
def engine(started: tuple[FakeEngine, httpx2.Client]) -> Iterator[FakeEngine]:
    engine, _ = started
    yield engine
    engine.error, engine.is_alive, engine.closing = None, True, False


@pytest.fixture
def client(started: tuple[FakeEngine, httpx2.Client]) -> httpx2.Client:
    return started[1]


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        (
            {"prompt": 5},
            "prompt",
            "Input should be a valid string, or: Input should be a valid list",
        ),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1"),
        ({"prompt": ["a", 1]}, None, ""),
        ({"prompt": [True]}, None, ""),
        ({"prompt": [-1]}, "prompt[0]", "greater than or equal to 0"),
        ({"prompt": [2**31]}, "prompt[0]", "less than or equal"),
        ({"prompt": [10**400]}, "prompt[0]", ""),
        ({"prompt": [400]}, "prompt", "prompt: [400] is wrong"),
        ({"prompt": ""}, "prompt", "wrong"),
        (
            {"prompt": "a" * 300},
            "prompt",
            "300 prompt tokens and 1 more are beyond the limit of 200",
        ),
        ({"prompt": "\ud800"}, "prompt", ""),
        ({"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": "a", "temperature": "warm"}, "temperature", "valid number"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature", "finite number"),
        ({"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
        (
            {"prompt": "a", "repetition_penalty": float("inf")},
            "repetition_penalty",
            "finite number",
        ),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "a", "n": True}, "n", "valid integer"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "min_tokens must be in [0, max_tokens]"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x", "match pattern"),
        ({"prompt": "a", "stop": ["b" * 1001]}, "stop[0]", "at most 1000 characters"),
        ({"prompt": "a", "seed": 2**63}, "seed", "less than or equal"),
        ({"prompt": "a", "best_of": 2}, "best_of", "best_of must equal n"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
        ({"prompt": "a", "cache_marks": [0]}, "cache_marks[0]", "greater than or equal to 1"),
        ({"prompt": ["a", "b"], "cache_marks": [1]}, "cache_marks", "needs a single prompt"),
        ({"prompt": "a", "cache_salt": "a" * 257}, "cache_salt", "at most 256"),
        ({"prompt": "a", "max_token": 5}, "max_token", "did you mean max_tokens"),
        ({"prompt": "a", "\ud800": 5}, None, "unicode"),
    ],
)
def test_wrong_completions(
    client: httpx2.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = client.post(
        COMPLETIONS, content=json.dumps(fields), headers={"content-type": "application/json"}
    )
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "at least 1"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role",
            "'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].image_url",
            "images are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "x"}}]},
            None,
            "ephemeral",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 300}]},
            "messages",
            "beyond the limit of 200",
        ),
        (
            {"messages": USER, "tools": [{"type": "function"}]},
            "tools[0].function",
            "tools[0].function is missing",
        ),
        (
            {"messages": USER, "response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema needs a schema",
        ),
        ({"messages": USER, "audio": {"voice": "x"}}, "audio", "audio is not supported"),
        (
            {"messages": USER, "modalities": ["audio"]},
            "modalities",
            "modalities is not supported",
        ),
        (
            {"messages": USER, "web_search_options": {}},
            "web_search_options",
            "web_search_options is not supported",
        ),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"messages": USER, "logprobs": 2}, "logprobs", "valid boolean"),
        (
            {"messages": USER, "stream": True, "prompt_logprobs": 1},
            "prompt_logprobs",
            "needs stream: false",
        ),
        ({"messages": USER, "continue_final_message": "yes"}, "continue_final_message", "boolean"),
    ],
)
def test_wrong_chats(
    client: httpx2.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    error = error_of(client.post(CHAT, json=fields), 400)
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param


def test_too_many_marks(client: httpx2.Client) -> None:
    marked = {"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}}
    assert (
        error_of(client.post(CHAT, json={"messages": [marked] * 17}), 400)["param"]
        == "cache_control"
    )


def test_a_model_without_a_template_or_a_template_that_refuses(
    client: httpx2.Client, engine: FakeEngine
) -> None:
    template = engine.tokenizer.backend.chat_template
    try:
        engine.tokenizer.backend.chat_template = None
        assert (
            "no chat template"
            in error_of(client.post(CHAT, json={"messages": USER}), 400)["message"]
        )
        engine.tokenizer.backend.chat_template = "{{ raise_exception('roles must alternate') }}"
        error = error_of(client.post(CHAT, json={"messages": USER}), 400)
        assert error["param"] == "messages"
        assert "roles must alternate" in error["message"]
    finally:
        engine.tokenizer.backend.chat_template = template


NO_JSON = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b"\xff",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"prompt": "a",}',
    b'{"n": %s}' % (b"1" * 5000),
]


@pytest.mark.parametrize("content", NO_JSON, ids=range(len(NO_JSON)))
def test_bodies_that_are_no_json_object(client: httpx2.Client, content: bytes) -> None:
    response = client.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json"}
    )
    assert "JSON" in error_of(response, 400)["message"]


def test_json_must_say_that_it_is(client: httpx2.Client) -> None:
    response = client.post(
        COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert "content-type application/json" in error_of(response, 400)["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_another_model_is_404(client: httpx2.Client, path: str) -> None:
    content = {CHAT: {"messages": USER}, "/detokenize": {"tokens": [1]}}.get(path, {"prompt": "a"})
    error = error_of(client.post(path, json={"model": "gpt-9", **content}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"]


def test_paths_and_methods(client: httpx2.Client) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert error_of(client.get("/v1/models/"), 404)
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    refused = client.get(COMPLETIONS)
    assert error_of(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt or messages"),
        ({"prompt": "a", "messages": USER}, "prompt or messages"),
        ({"prompt": 1}, "valid string"),
    ],
)
def test_wrong_tokenize(client: httpx2.Client, fields: dict[str, Any], message: str) -> None:
    assert message in error_of(client.post("/tokenize", json=fields), 400)["message"]


def test_wrong_detokenize(client: httpx2.Client) -> None:
    assert error_of(client.post("/detokenize", json={"tokens": [257]}), 400)["param"] == "tokens"
    assert error_of(client.post("/detokenize", json={"tokens": [-1]}), 400)["param"] == "tokens[0]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueFullError(2.2), 429, "queue_full", "3"),
        (EngineClosedError("closing"), 503, "shutting_down", "5"),
        (EngineDeadError("secret"), 500, "engine_dead", None),
        (StepFailedError("secret"), 500, "step_failed", None),
        (ConfigError("seed must be even"), 400, None, None),
        (UnsupportedError("min_p cannot be had"), 400, None, None),
        (ZeroDivisionError("secret"), 500, "internal_error", None),
    ],
)
def test_what_the_engine_raises(
    client: httpx2.Client,
    engine: FakeEngine,
    error: Exception,
    status: int,
    code: str,
    retry: str | None,
    stream: bool,
) -> None:
    engine.error = error
    response = client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
    found = error_of(response, status)
    assert found["code"] == code
    assert response.headers.get("retry-after") == retry
    assert "secret" not in response.text
    if status == 400:
        assert found["param"] == found["message"].split()[0]


def test_clients_see_their_own_exceptions(client: httpx2.Client, engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as asks:
        with pytest.raises(openai.BadRequestError) as bad:
            asks.completions.create(model="fake", prompt="a" * 300)
        assert bad.value.param == "prompt"
        assert bad.value.code == "context_length_exceeded"
        engine.error = QueueFullError(1)
        with pytest.raises(openai.RateLimitError):
            asks.completions.create(model="fake", prompt="a")
        engine.error = StepFailedError("crashed")
        with pytest.raises(openai.InternalServerError):
            asks.completions.create(model="fake", prompt="a")


def test_health(client: httpx2.Client, engine: FakeEngine) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    engine.is_alive = False
    assert error_of(client.get("/health"), 503)["code"] == "engine_dead"
    engine.closing = True
    assert error_of(client.get("/health"), 503)["code"] == "shutting_down"


def test_messages_of_the_engine_name_their_field() -> None:
    assert describe(ConfigError("logit_bias: token id 7 is outside")).param == "logit_bias"
    assert describe(ConfigError("the prompt is empty"), "prompt").param == "prompt"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "prompt",
        "messages",
        "n",
        "stop",
        "logit_bias",
        "logprobs",
        "stream",
        "stream_options",
        "tools",
        "cache_marks",
        "echo",
        "seed",
    ]
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=st.dictionaries(NAMES, ANYTHING, max_size=4), base=st.booleans())
def test_whatever_comes_is_no_mistake_of_the_server(
    client: httpx2.Client, path: str, fields: dict[str, Any], base: bool
) -> None:
    good = (
        {CHAT: {"messages": USER}, "/detokenize": {"tokens": [1]}}.get(path, {"prompt": "a"})
        if base
        else {}
    )
    response = client.post(
        path, content=json.dumps(good | fields), headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400), response.text
