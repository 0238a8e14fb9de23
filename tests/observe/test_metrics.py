"""Metrics as Prometheus reads them: names, help, and that every number of the counters is told."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.observe.metrics import Metrics
from tests.server.fakes import FakeEngine


def read(metrics: Metrics) -> dict[str, Metric]:
    text = metrics.exposition(asyncio.run(FakeEngine().counters())).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_has_a_name_of_ours_and_help() -> None:
    families = read(Metrics())
    assert len(families) > 12
    for name, family in families.items():
        assert name.startswith("octavo_")
        assert family.documentation.endswith(".")


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("octavo_requests_running", "gauge", 2),
        ("octavo_requests_waiting", "gauge", 1),
        ("octavo_preemptions", "counter", 3),
        ("octavo_crashed_steps", "counter", 1),
        ("octavo_engine_recoveries", "counter", 12),
        ("octavo_invalid_numbers", "counter", 13),
        ("octavo_prompt_tokens", "counter", 100),
        ("octavo_cached_prompt_tokens", "counter", 40),
        ("octavo_generated_tokens", "counter", 7),
        ("octavo_evicted_nodes", "counter", 11),
        ("octavo_compacted_slabs", "counter", 6),
        ("octavo_moved_pages", "counter", 8),
        ("octavo_free_slabs", "gauge", 9),
    ],
)
def test_single_numbers(name: str, kind: str, value: float) -> None:
    family = read(Metrics())[name]
    assert family.type == kind
    (sample,) = family.samples
    assert sample.value == value


def test_misses_and_pages_by_label() -> None:
    families = read(Metrics())
    (miss,) = families["octavo_prefix_misses"].samples
    assert (miss.labels, miss.value) == ({"limited_by": "window 16", "cause": "no_checkpoint"}, 5)
    buckets = {
        tuple(sample.labels.values()): sample.value
        for sample in families["octavo_bucket_pages"].samples
    }
    assert len(buckets) == 8
    assert buckets["1", "8192", "free"] == 1
    assert buckets["0", "4096", "limbo"] == 4
    groups = {
        tuple(sample.labels.values()): sample.value
        for sample in families["octavo_group_pages"].samples
    }
    assert len(groups) == 6
    assert groups["1", "window 16", "held"] == 2
    assert groups["0", "everything", "cached"] == 3


def test_times_are_noted_and_engines_do_not_share_them() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.first_token(0.2)
    metrics.inter_token(0.004)
    metrics.inter_token(0.004)
    metrics.finished("length", prompt_tokens=5, cached_tokens=0, generated_tokens=3, seconds=3.0)
    families = read(metrics)

    def sample(family: str, suffix: str) -> float:
        return next(one.value for one in families[family].samples if one.name == family + suffix)

    assert sample("octavo_time_to_first_token_seconds", "_sum") == pytest.approx(0.2)
    assert sample("octavo_inter_token_seconds", "_count") == 2
    assert sample("octavo_request_seconds", "_sum") == pytest.approx(3.0)
    (finished,) = [
        one for one in families["octavo_requests_finished"].samples if one.name.endswith("_total")
    ]
    assert (finished.labels, finished.value) == ({"reason": "length"}, 1)
    assert read(other)["octavo_requests_finished"].samples == []
