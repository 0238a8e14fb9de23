"""An engine's numbers for Prometheus.

Owns names, help and buckets. Times are noted as they happen (``Metrics`` is the engine's recorder);
everything else comes from ``EngineCounters``, taken when somebody asks. Every ``Metrics`` has a
registry of its own, so several engines fit in a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from octavo.memory.page import Counts

if TYPE_CHECKING:
    from octavo.engine.insight import EngineCounters

__all__ = ["CONTENT_TYPE", "Metrics"]

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
INTER_TOKEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
REQUEST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
"""Upper bounds of histogram buckets, in seconds."""

STATES = ("free", "held", "cached", "limbo")


class Metrics:
    """Times of requests, and on request everything as text. Implements the engine's
    ``Recorder``.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._first_token = Histogram(
            "octavo_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=FIRST_TOKEN,
            registry=registry,
        )
        self._inter_token = Histogram(
            "octavo_inter_token_seconds",
            "Between two tokens of a continuation.",
            buckets=INTER_TOKEN,
            registry=registry,
        )
        self._request = Histogram(
            "octavo_request_seconds", "From arrival to the end.", buckets=REQUEST, registry=registry
        )
        self._finished = Counter(
            "octavo_requests_finished", "Requests by why they ended.", ["reason"], registry=registry
        )
        self._responses = Counter(
            "octavo_http_responses",
            "HTTP responses by path and status.",
            ["path", "status"],
            registry=registry,
        )

    def first_token(self, seconds: float) -> None:
        """Note the time from arrival to the first token."""
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """Note the time between two tokens of one continuation."""
        self._inter_token.observe(seconds)

    def finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        generated_tokens: int,
        seconds: float,
    ) -> None:
        """Note that a request ended. Tokens are not counted here: the engine counts them as they
        come.
        """
        self._finished.labels(reason).inc()
        self._request.observe(seconds)

    def responded(self, path: str, status: int) -> None:
        """Note a response to a request for one of the server's own paths."""
        self._responses.labels(path, str(status)).inc()

    def exposition(self, counters: EngineCounters) -> bytes:
        """Everything in Prometheus' text format, ``CONTENT_TYPE``."""
        now = CollectorRegistry()
        now.register(
            _Once([*_requests(counters), *_tokens(counters), *_cache(counters), *_pages(counters)])
        )
        return generate_latest(now) + generate_latest(self._registry)


class _Once(Collector):
    """Metrics of one moment."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _requests(counters: EngineCounters) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "octavo_requests_running", "Continuations being computed.", counters.num_running
    )
    yield GaugeMetricFamily(
        "octavo_requests_waiting", "Continuations waiting for admission.", counters.num_waiting
    )
    yield CounterMetricFamily(
        "octavo_preemptions",
        "Times a request gave its pages back to be computed again.",
        counters.preemptions,
    )
    yield CounterMetricFamily(
        "octavo_crashed_steps", "Steps of which nothing was kept.", counters.crashed_steps
    )
    yield CounterMetricFamily(
        "octavo_engine_recoveries",
        "Times the scheduler broke and its requests were computed again.",
        counters.recoveries,
    )
    yield CounterMetricFamily(
        "octavo_invalid_numbers",
        "Requests ended because the model computed NaN or infinity.",
        counters.invalid_numbers,
    )


def _tokens(counters: EngineCounters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "octavo_prompt_tokens", "Prompt tokens, cached ones included.", counters.prompt_tokens
    )
    yield CounterMetricFamily(
        "octavo_cached_prompt_tokens",
        "Prompt tokens that the prefix cache spared.",
        counters.cached_tokens,
    )
    yield CounterMetricFamily(
        "octavo_generated_tokens", "Tokens sampled.", counters.generated_tokens
    )


def _cache(counters: EngineCounters) -> Iterator[Metric]:
    misses = CounterMetricFamily(
        "octavo_prefix_misses",
        "Prompts that hit less than they might have, by the law of the group that limited the hit"
        " and by cause.",
        labels=["limited_by", "cause"],
    )
    for (law, cause), number in counters.misses.items():
        misses.add_metric([law, cause], number)
    yield misses
    pages = counters.pages
    yield CounterMetricFamily(
        "octavo_evicted_nodes", "Hash units evicted from the prefix index.", pages.evicted_nodes
    )
    yield CounterMetricFamily(
        "octavo_compacted_slabs", "Slabs emptied by moving their pages.", pages.compactions
    )
    yield CounterMetricFamily("octavo_moved_pages", "Pages moved by compaction.", pages.moved_pages)


def _pages(counters: EngineCounters) -> Iterator[Metric]:
    pages = counters.pages
    yield GaugeMetricFamily(
        "octavo_free_slabs", "Slabs that any page size may have.", pages.free_slabs
    )
    buckets = GaugeMetricFamily(
        "octavo_bucket_pages", "Pages by size and state.", labels=["bucket", "page_bytes", "state"]
    )
    for index, (size, counts) in enumerate(zip(counters.page_bytes, pages.buckets, strict=True)):
        _add(buckets, [str(index), str(size)], counts, STATES)
    yield buckets
    groups = GaugeMetricFamily(
        "octavo_group_pages", "Pages by group and state.", labels=["group", "law", "state"]
    )
    for index, (law, counts) in enumerate(zip(counters.laws, pages.groups, strict=True)):
        _add(groups, [str(index), law], counts, STATES[1:])
    yield groups


def _add(
    family: GaugeMetricFamily, labels: list[str], counts: Counts, states: Iterable[str]
) -> None:
    for state in states:
        family.add_metric([*labels, state], getattr(counts, state))
