"""What an engine says about itself while it runs: counters for metrics, and everything else as
JSON.

Owns ``Tally`` (sums over all requests so far), ``EngineCounters`` and ``describe``. Only asks; to
be called between steps, by whoever steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from octavo.cache.inspect import PageCounts, count_pages, inspect
from octavo.cache.report import MissCause
from octavo.engine.outputs import RequestDelta
from octavo.sched.scheduler import Scheduler

SHOWN_EXPLANATIONS = 50
"""Latest hit explanations told by ``describe``."""


@dataclass(kw_only=True)
class Tally:
    """Sums over all requests. misses: by law of the group that limited the hit (or ``all``) and
    cause. recoveries: times the scheduler was made again. invalid_numbers: requests for which the
    model computed NaN or infinity.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    crashed_steps: int = 0
    recoveries: int = 0
    invalid_numbers: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, delta: RequestDelta) -> None:
        """Count what one step brought to one request."""
        if delta.prompt_token_ids:
            self.prompt_tokens += len(delta.prompt_token_ids)
            self.cached_tokens += delta.num_cached_tokens
        if delta.explanation is not None and delta.explanation.cause is not MissCause.NONE:
            self.misses.update(
                (law, str(delta.explanation.cause))
                for law in delta.explanation.limited_by or ("all",)
            )
        for output in delta.outputs:
            self.generated_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.finished[output.finish_reason] += 1


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Numbers of one moment. laws: of every group; page_bytes: of every bucket; pages: counts of
    both.

    finished: continuations by reason. crashed_steps: steps of which nothing was kept. recoveries,
    invalid_numbers: as in ``Tally``.
    """

    num_running: int
    num_waiting: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    crashed_steps: int
    recoveries: int
    invalid_numbers: int
    finished: Mapping[str, int]
    misses: Mapping[tuple[str, str], int]
    laws: tuple[str, ...]
    page_bytes: tuple[int, ...]
    pages: PageCounts


def count(scheduler: Scheduler, tally: Tally) -> EngineCounters:
    """All counters now."""
    layout = scheduler.cache.layout
    return EngineCounters(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        preemptions=scheduler.num_preemptions,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        generated_tokens=tally.generated_tokens,
        crashed_steps=tally.crashed_steps,
        recoveries=tally.recoveries,
        invalid_numbers=tally.invalid_numbers,
        finished=dict(tally.finished),
        misses=dict(tally.misses),
        laws=tuple(group.group.law.describe() for group in layout.groups),
        page_bytes=tuple(units * layout.arena.unit_bytes for units in layout.arena.page_units),
        pages=count_pages(scheduler.cache),
    )


def describe(scheduler: Scheduler, tally: Tally) -> dict[str, Any]:
    """Statistics, cache, requests and hit explanations, for ``json.dumps(..., default=vars)``; see
    docs/inspecting.md.
    """
    cache = dict(vars(inspect(scheduler.cache)))
    holding = {request.request_id: vars(request) for request in cache.pop("requests")}
    counters = count(scheduler, tally)
    return {
        "stats": {
            "running": counters.num_running,
            "waiting": counters.num_waiting,
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": counters.cached_tokens,
            "generated_tokens": counters.generated_tokens,
            "preemptions": counters.preemptions,
            "crashed_steps": counters.crashed_steps,
            "recoveries": counters.recoveries,
            "invalid_numbers": counters.invalid_numbers,
            "finished": sum(counters.finished.values()),
        },
        "cache": cache,
        "requests": [
            {
                "request_id": request.request_id,
                "tokens": request.num_tokens,
                "computed": 0,
                "cached_tokens": request.num_cached_tokens,
                "groups": [],
                **holding.get(request.request_id, {}),
                "state": str(request.state),
                "priority": request.priority,
            }
            for request in scheduler.requests
        ],
        "explanations": [
            {"request_id": request_id, **vars(found)}
            for request_id, found in islice(
                reversed(scheduler.explanations.items()), SHOWN_EXPLANATIONS
            )
        ],
    }
