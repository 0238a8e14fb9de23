"""Responses are counted by path and status, whoever answered."""

from __future__ import annotations

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.aio import QueueFullError
from octavo.server.app import create_app
from tests.server.fakes import FakeEngine, serving


def test_every_response_counts_once() -> None:
    engine = FakeEngine()
    headers = {"authorization": "Bearer k"}
    with (
        serving(create_app(engine, api_key="k", max_body_bytes=99)) as url,  # type: ignore[arg-type]
        httpx2.Client(base_url=url, headers=headers) as client,
    ):
        for body in (
            {"prompt": "a"},
            {"prompt": "a", "stream": True},
            {"prompt": 1},
            {"prompt": "a" * 99},
        ):
            client.post("/v1/completions", json=body)
        engine.error = QueueFullError(1)
        client.post("/v1/completions", json={"prompt": "a"})
        engine.error = ZeroDivisionError("a mistake")
        client.post("/v1/completions", json={"prompt": "a"})
        client.get("/v1/models/fake")
        client.get("/v1/models/other")
        client.get("/made/up")
        client.get("/version", headers={"authorization": "none"})
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counted = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in families["octavo_http_responses"].samples
        if sample.name.endswith("_total")
    }
    assert counted == {
        ("/v1/completions", "200"): 2,
        ("/v1/completions", "400"): 1,
        ("/v1/completions", "429"): 1,
        ("/v1/completions", "500"): 1,
        ("/v1/models/{model:path}", "200"): 1,
        ("/v1/models/{model:path}", "404"): 1,
        ("other", "413"): 1,
        ("other", "404"): 1,
        ("other", "401"): 1,
    }
