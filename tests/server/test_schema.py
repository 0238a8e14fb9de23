"""Requests made from the server's own OpenAPI document, good and bad: answers are as documented,
and never a 5xx.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.engine.aio import AsyncLLM
from octavo.observe.metrics import Metrics
from octavo.server.app import create_app
from tests.server.fakes import FakeEngine, serving, wait_until
from tests.server.test_engine import OPTIONS, write_model

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
"""Of every operation and mode; ``make bench-fuzz`` takes many more."""

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


DOCUMENT = schemathesis.openapi.from_dict(create_app(FakeEngine()).openapi())  # type: ignore[arg-type]
OPERATIONS: Any = [found.ok() for found in DOCUMENT.get_all_operations()]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    metrics = Metrics()
    # Short, so that requests for as many tokens as fit are answered soon.
    options = OPTIONS | {"max_model_len": 64, "max_num_seqs": 8}
    engine = AsyncLLM.load(
        str(write_model(tmp_path_factory.mktemp("schema"))), recorder=metrics, **options
    )
    with serving(create_app(engine, model_name="tiny", metrics=metrics)) as url:
        yield url
        assert httpx2.get(f"{url}/health").status_code == 200
        assert wait_until(lambda: not busy(httpx2.get(f"{url}/cache").json()))


def busy(inside: dict[str, Any]) -> int:
    """Requests, and pages that they hold."""
    return len(inside["requests"]) + sum(
        bucket["held"] + bucket["limbo"] for bucket in inside["cache"]["buckets"]
    )


def make_sensible(body: dict[str, Any]) -> None:
    """Else most would end at a model that is not there, or at an empty prompt."""
    if "model" in body:
        body["model"] = "tiny"
    match body.get("prompt"):
        case "":
            body["prompt"] = "a"
        case [str(), *_] as prompts:
            body["prompt"] = [text or "a" for text in prompts]


@pytest.mark.parametrize(
    ("operation", "mode"),
    [(operation, POSITIVE) for operation in OPERATIONS]
    + [(operation, NEGATIVE) for operation in OPERATIONS if operation.body],
    ids=lambda value: getattr(value, "label", value),
)
def test_every_answer_is_as_documented(operation: Any, mode: GenerationMode, url: str) -> None:
    statuses = Counter[int]()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answer(case: Any) -> None:
        if mode is POSITIVE and isinstance(case.body, dict):
            make_sensible(case.body)
        statuses[case.call_and_validate(base_url=url, checks=CHECKS, timeout=60).status_code] += 1

    answer()
    assert statuses[200] or mode is NEGATIVE or operation.path_parameters, statuses


@pytest.mark.parametrize(
    ("label", "asked"),
    [
        ("POST /v1/completions", {"prompt": "a"}),
        ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_streams_are_as_documented(label: str, asked: dict[str, Any], url: str) -> None:
    operation = next(operation for operation in OPERATIONS if operation.label == label)
    case = operation.Case(
        body=asked | {"stream": True, "max_tokens": 3}, media_type="application/json"
    )
    assert case.call_and_validate(base_url=url, checks=CHECKS, timeout=60).status_code == 200
