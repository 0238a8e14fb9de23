"""What goes over the wire while streaming, byte by byte, and what happens when one side ends
early.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from octavo.engine.aio import StepFailedError
from octavo.server.app import create_app
from tests.server.fakes import FakeEngine, serving, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    with serving(create_app(engine)) as url:  # type: ignore[arg-type]
        yield engine, url


@pytest.fixture
def engine(started: tuple[FakeEngine, str]) -> Iterator[FakeEngine]:
    engine, _ = started
    yield engine
    engine.stalls_at, engine.breaks, engine.error, engine.pace = None, None, None, 0.0
    engine.ended.clear()


@pytest.fixture
def url(started: tuple[FakeEngine, str]) -> str:
    return started[1]


def body(path: str, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    return said | {"max_tokens": 2, "stream": True} | fields


def test_chat_stream_bytes(engine: FakeEngine, url: str) -> None:
    response = httpx2.post(url + CHAT, json=body(CHAT, stream_options={"include_usage": True}))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    head = (
        f'{{"id":"{first["id"]}","object":"chat.completion.chunk",'
        f'"created":{first["created"]},"model":"fake","choices":['
    )
    usage = (
        '{"prompt_tokens":19,"completion_tokens":2,"total_tokens":21,'
        '"prompt_tokens_details":{"cached_tokens":16}}'
    )
    assert response.text == "".join(
        f"data: {event}\n\n"
        for event in (
            head + '{"index":0,"delta":{"role":"assistant","content":"","refusal":null},'
            '"logprobs":null,"finish_reason":null}],'
            '"usage":null}',
            head + '{"index":0,"delta":{"content":"G"},'
            '"logprobs":null,"finish_reason":null}],"usage":null}',
            head + '{"index":0,"delta":{"content":"r"},'
            '"logprobs":null,"finish_reason":null}],"usage":null}',
            head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length",'
            '"stop_reason":null}],"usage":null}',
            head + f'],"usage":{usage}}}',
            "[DONE]",
        )
    )


def test_completion_stream_bytes(engine: FakeEngine, url: str) -> None:
    response = httpx2.post(url + COMPLETIONS, json=body(COMPLETIONS))
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    head = (
        f'{{"id":"{first["id"]}","object":"text_completion",'
        f'"created":{first["created"]},"model":"fake","choices":['
    )
    assert (
        response.text == "data:"
        f' {head}{{"index":0,"text":"G","logprobs":null,'
        '"finish_reason":null,"stop_reason":null}]}\n\ndata:'
        f' {head}{{"index":0,"text":"r","logprobs":null,'
        '"finish_reason":"length","stop_reason":null}]}\n\ndata:'
        " [DONE]\n\n"
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_error_before_the_first_token_keeps_its_status(
    engine: FakeEngine, url: str, path: str
) -> None:
    engine.error = StepFailedError("the step crashed")
    response = httpx2.post(url + path, json=body(path))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "step_failed"


def test_one_wrong_prompt_among_many_keeps_its_status(engine: FakeEngine, url: str) -> None:
    response = httpx2.post(url + COMPLETIONS, json=body(COMPLETIONS, prompt=["a", "b" * 500, "c"]))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert wait_until(lambda: not engine.open)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("error", "code"),
    [(StepFailedError("the step crashed"), "step_failed"), (KeyError("bug"), "internal_error")],
)
def test_an_error_after_the_first_token_is_an_event(
    engine: FakeEngine, url: str, path: str, error: Exception, code: str
) -> None:
    engine.breaks = (1, error)
    response = httpx2.post(url + path, json=body(path, max_tokens=5))
    assert response.status_code == 200
    *events, last, end = response.text.split("\n\n")
    assert events
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert end == ""
    assert "bug" not in response.text
    assert wait_until(lambda: not engine.open)


def test_the_client_raises_what_the_event_says(engine: FakeEngine, url: str) -> None:
    engine.breaks = (2, StepFailedError("the step crashed"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="it may work when sent again"):
            list(stream)


def connect(url: str, path: str, payload: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request."""
    where = urlsplit(url)
    sent = socket.create_connection((where.hostname, where.port))
    content = json.dumps(payload).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
        f" {len(content)}\r\n\r\n"
    )
    sent.sendall(head.encode() + content)
    return sent


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("stream", "stalls_at"), [(True, 0), (True, 2), (False, 0), (False, 2)])
def test_who_hangs_up_ends_the_request(
    engine: FakeEngine, url: str, path: str, stream: bool, stalls_at: int
) -> None:
    engine.stalls_at = stalls_at
    sent = connect(url, path, body(path, stream=stream, max_tokens=9))
    assert wait_until(lambda: len(engine.open) == 1)
    if stream and stalls_at:
        assert b"200 OK" in sent.recv(1000)
    assert engine.ended == []
    sent.close()
    assert wait_until(lambda: len(engine.ended) == 1)
    assert engine.open == set()


def test_who_hangs_up_ends_all_his_prompts(engine: FakeEngine, url: str) -> None:
    engine.stalls_at = 1
    sent = connect(url, COMPLETIONS, body(COMPLETIONS, prompt=["a", "b", "c"], max_tokens=9))
    assert wait_until(lambda: len(engine.open) == 3)
    sent.close()
    assert wait_until(lambda: len(engine.ended) == 3)


def test_a_reader_that_reads_nothing_holds_up_nobody(engine: FakeEngine, url: str) -> None:
    engine.stalls_at = 3
    sent = connect(url, COMPLETIONS, body(COMPLETIONS, max_tokens=9))
    assert wait_until(lambda: len(engine.open) == 1)
    engine.stalls_at = None
    assert httpx2.post(url + COMPLETIONS, json=body(COMPLETIONS)).status_code == 200
    sent.close()
    assert wait_until(lambda: not engine.open)
