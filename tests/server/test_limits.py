"""What is refused unread: bodies beyond the limit, and requests without the key."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import openai
import pytest

from octavo.base import ConfigError
from octavo.server.app import create_app
from tests.server.fakes import ANSWER, FakeEngine, serving

KEY = "schlüssel"
LIMIT = 1000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(FakeEngine(), api_key=KEY, max_body_bytes=LIMIT)) as url:  # type: ignore[arg-type]
        yield url


def headers(key: str = KEY) -> dict[str, str | bytes]:
    return {"authorization": b"Bearer " + key.encode(), "content-type": "application/json"}


def payload(size: int) -> bytes:
    rest = json.dumps({"prompt": "a", "user": ""}).encode()
    return json.dumps({"prompt": "a", "user": "u" * (size - len(rest))}).encode()


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(url: str, chunked: bool) -> None:
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413), (50 * LIMIT, 413)):
        content = payload(size)
        pieces = (
            (content[start : start + 300] for start in range(0, size, 300)) if chunked else content
        )
        response = httpx2.post(f"{url}/v1/completions", content=pieces, headers=headers())
        assert response.status_code == status
    assert response.json()["error"]["code"] == "request_too_large"
    assert "1000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer wrong", "Basic schl", KEY.encode(), b"Bearer \xff\xfe"]
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/completions",
        "/metrics",
        "/cache",
        "/version",
        "/openapi.json",
        "/nothing",
        "/health/",
    ],
)
def test_without_the_key(url: str, path: str, value: str | bytes | None) -> None:
    response = httpx2.get(url + path, headers={} if value is None else {"authorization": value})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_with_the_key(url: str) -> None:
    for path in ("/v1/models", "/metrics", "/cache", "/version", "/openapi.json"):
        assert httpx2.get(url + path, headers=headers()).status_code == 200
    assert (
        httpx2.get(
            f"{url}/v1/models", headers={"authorization": b"bearer " + KEY.encode()}
        ).status_code
        == 200
    )


def test_health_and_page_need_no_key(url: str) -> None:
    assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
    page = httpx2.get(f"{url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.lower().startswith("<!doctype html>")


def test_the_client_brings_its_key() -> None:
    with (
        serving(create_app(FakeEngine(), api_key="k")) as url,  # type: ignore[arg-type]
        openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client,
        openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0) as stranger,
    ):
        assert (
            client.completions.create(model="fake", prompt="a", max_tokens=99).choices[0].text
            == ANSWER
        )
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_a_mistake(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key must not be empty"):
        create_app(FakeEngine(), api_key=key)  # type: ignore[arg-type]


def test_a_key_from_a_file_may_end_with_a_line_break() -> None:
    with serving(create_app(FakeEngine(), api_key=f"{KEY}\n")) as base:  # type: ignore[arg-type]
        assert httpx2.get(f"{base}/v1/models", headers=headers()).status_code == 200
        assert httpx2.get(f"{base}/v1/models").status_code == 401


def test_the_document_names_key_and_errors() -> None:
    document = create_app(FakeEngine(), api_key="k").openapi()  # type: ignore[arg-type]
    (scheme,) = document["components"]["securitySchemes"].values()
    assert scheme["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert ("security" in operation) == (path != "/health")
            for status, response in operation["responses"].items():
                if status not in ("200",):
                    assert response["content"]["application/json"]["schema"]["$ref"].endswith(
                        "/ErrorBody"
                    )
