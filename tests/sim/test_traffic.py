"""Traffic: counts that can be known without any cache, arrivals and queues, runs whose every read
and write is checked, and hits of every policy beside those of the simplest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count

import pytest

from octavo.base import ConfigError
from octavo.cache.index.policy import POLICIES
from octavo.cache.layout import CacheLayout
from octavo.cache.underway import StepUnderway
from octavo.sim.fake import Violation
from octavo.sim.generate import GENERATORS, load_trace
from octavo.sim.model import ToyGroup, toy_layout
from octavo.sim.page import Title, page
from octavo.sim.traces import TraceRequest
from octavo.sim.traffic import Load, TrafficReport, send
from octavo.spec.law import Everything, Snapshot, Window

SMALL = "length=48,own=8,output=6"
SIZES = {
    "uniform": f"documents=60,{SMALL}",
    "zipf": f"documents=120,{SMALL}",
    "scans": f"documents=30,scan=20,between=20,{SMALL}",
    "loops": f"documents=60,{SMALL}",
    "sessions": "users=24,turns=6,system=24,own=12,output=8",
    "agents": "tool=40,own=8,output=6",
    "phases": f"documents=30,period=60,{SMALL}",
    "salts": "users=24,turns=6,system=24,own=12,output=8",
}
"""Options under which the working set of a trace is a few hundred blocks of a toy."""


@cache
def traffic(name: str, requests: int = 200, seed: int = 0) -> tuple[TraceRequest, ...]:
    return tuple(load_trace(f"{name}:seed={seed},requests={requests},{SIZES[name]}"))


def layout(*, slabs: int, bounded: bool = True) -> CacheLayout:
    """Blocks of 8 tokens in hash units of 4; a window and a state beside what grows."""
    groups = [ToyGroup(law=Everything(), block_tokens=8)]
    if bounded:
        groups += [
            ToyGroup(law=Window(12), block_tokens=4),
            ToyGroup(law=Snapshot(), block_tokens=1, entry_bytes=512),
        ]
    return toy_layout(groups, hash_unit=4, slab_pages=8, num_slabs=slabs, max_model_len=512)


def run(
    requests: Sequence[TraceRequest], where: CacheLayout, *, eviction: str = "lru", **load: object
) -> TrafficReport:
    ticks = count()
    return send(
        where,
        requests,
        Load(**{"closed": 4, "max_num_batched_tokens": 128, **load}),  # type: ignore[arg-type]
        clock=lambda: float(next(ticks)),
        eviction=eviction,
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_an_unlimited_cache_of_all_tokens_has_all_that_was_there_before(name: str) -> None:
    requests = traffic(name, 120)
    report = run(requests, layout(slabs=4000, bounded=False), closed=1)
    assert report.requests == 120 and report.refused == 0
    assert report.prompt_tokens == sum(request.prompt_length for request in requests)
    assert report.output_tokens == sum(request.output_length for request in requests)
    assert report.hit_tokens == report.possible_tokens > 0
    assert report.evictions == report.preemptions == report.recomputed_tokens == 0
    assert sum(miss.tokens for miss in report.misses.values()) == 0
    assert sum(miss.requests for miss in report.misses.values()) == 120


def test_what_is_missed_has_a_cause_and_a_group() -> None:
    report = run(traffic("zipf"), layout(slabs=100))
    missed = sum(miss.tokens for miss in report.misses.values())
    assert report.possible_tokens == report.hit_tokens + missed
    assert report.hit_tokens and report.evictions
    assert {"none", "evicted", "no_checkpoint"} <= set(report.misses)
    assert report.misses["none"].tokens == 0 < report.misses["no_checkpoint"].tokens
    assert set(report.limited) <= {"window 12", "snapshot"} and report.limited["snapshot"]
    assert report.peak_held < report.peak_used <= report.arena == report.memory


def test_pages_that_run_out_are_told() -> None:
    requests = [TraceRequest(prompt=((each, 30),), output_length=60) for each in range(12)]
    report = run(requests, layout(slabs=5), closed=6)
    assert report.preemptions and report.recomputed_tokens > 0
    assert report.peak_held > 0.8 * report.arena


def test_what_can_never_be_served_is_refused_and_counted() -> None:
    long = TraceRequest(prompt=(("long", 500),), output_length=20)
    large = TraceRequest(prompt=(("large", 400),), output_length=20)
    good = TraceRequest(prompt=(("good", 20),), output_length=2)
    report = run([long, large, good, good], layout(slabs=6), closed=1)
    assert (report.requests, report.refused) == (2, 2)
    assert report.hit_tokens == 16 and report.requests_with_hits == 1


@pytest.mark.parametrize("closed", [1, 3])
def test_a_closed_loop_keeps_so_many_unfinished(closed: int) -> None:
    """Every prompt takes a step, every further token one more."""
    requests = [TraceRequest(prompt=((each, 8),), output_length=5) for each in range(9)]
    report = run(requests, layout(slabs=100), closed=closed, step_seconds=1, tokens_per_second=1e9)
    assert report.steps == 9 // closed * 5
    assert report.waits.p95 == pytest.approx(1.0, abs=1e-3), "nobody waits for a row"
    assert report.waits.waiting == 0


def test_requests_arrive_when_the_trace_says_and_queue_where_they_come_too_fast() -> None:
    """Steps of 2 s with one token each; prompts of 8 tokens, one after another, in one row."""
    requests = [
        TraceRequest(prompt=((each, 8),), output_length=3, arrival=arrival)
        for each, arrival in enumerate((100.0, 0.0, 1.0))
    ]
    timing = {"step_seconds": 2, "tokens_per_second": 1e9, "max_running": 1}
    report = run(requests, layout(slabs=100), closed=None, **timing)
    # The second one comes at 0 and runs to 6; the third comes at 1 and gets its first token at 8,
    # 7 s later; the first has the machine for itself.
    assert report.waits.p50 == pytest.approx(2.0)
    assert report.waits.p95 == pytest.approx(7.0)
    assert report.waits.end == pytest.approx(106.0)
    assert report.waits.waiting == 1
    fast = run(requests, layout(slabs=100), closed=None, speed=100, **timing)
    assert fast.waits.end == pytest.approx(18.0), "all of them wait"


def test_seconds_are_those_of_the_clock_that_was_given() -> None:
    """Of a clock that goes on by one whenever it is asked, a call takes one."""
    requests = [TraceRequest(prompt=((each, 8),), output_length=5) for each in range(6)]
    report = run(requests, layout(slabs=100), closed=1)
    assert report.seconds.add == 6
    assert report.seconds.schedule == report.seconds.commit == report.steps == 30
    assert report.step_microseconds == pytest.approx((6 + 30 + 30) / 30 * 1e6)
    assert report.seconds.driver > 0


@pytest.mark.parametrize("name", GENERATORS)
def test_a_checked_run_reads_what_it_should_and_changes_nothing(name: str) -> None:
    requests, ticks = traffic(name, 40), count()
    load = Load(closed=4, max_num_batched_tokens=64, checkpoint_interval=24)
    plain, checked = (
        send(layout(slabs=30), requests, load, clock=lambda: next(ticks), check=check)
        for check in (False, True)
    )
    assert checked.checked_entries > 5_000 and plain.checked_entries == 0
    assert checked.evictions > 0
    same = [
        {**report.to_json(), **dict.fromkeys(("seconds", "checked_entries", "step_microseconds"))}
        for report in (plain, checked)
    ]
    for report in same:
        del report["manager_seconds"]
    assert same[0] == same[1]


def test_a_checked_run_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepUnderway, "take_copies", lambda self: ())
    with pytest.raises(Violation, match="reads tokens"):
        send(layout(slabs=30), traffic("zipf", 40), Load(closed=4), clock=float, check=True)


@cache
def under_pressure(name: str, policy: str) -> TrafficReport:
    """A run at a size at which a good part of the trace does not fit."""
    return run(traffic(name), layout(slabs=60), eviction=policy)


@pytest.mark.parametrize("name", GENERATORS)
def test_traces_are_larger_than_the_cache_that_policies_are_compared_in(name: str) -> None:
    report = under_pressure(name, "lru")
    assert report.evictions > 200 and report.possible_tokens > 1.1 * report.hit_tokens


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "lru"])
def test_no_policy_loses_much_against_the_least_recently_used(policy: str, name: str) -> None:
    simple = under_pressure(name, "lru").hit_tokens
    assert under_pressure(name, policy).hit_tokens >= 0.97 * simple


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"eviction 'nru' is no policy; there are worth, lru"):
        run(traffic("zipf", 3), layout(slabs=60), eviction="nru")
    for option, value in (("closed", 0), ("speed", 0.0), ("step_seconds", -1.0)):
        with pytest.raises(ConfigError, match=option):
            Load(**{option: value})  # type: ignore[arg-type]


def test_the_page_has_every_run_and_no_script() -> None:
    reports = [run(traffic("zipf", 60), layout(slabs=slabs)) for slabs in (40, 80)]
    title = Title(model="a <toy>", trace="zipf", driven="4 at once")
    made = page(title, reports)
    assert "a &lt;toy&gt;" in made and "<script" not in made and "http" not in made
    assert made.count("<circle") == 2
    for report in reports:
        assert f"{report.hit_rate:.2%}" in made
