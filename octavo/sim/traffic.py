"""What a model's cache would make of given traffic: the real scheduler and cache, driven by a
device that computes nothing.

Owns ``send`` and its report: the order of arrivals, a model of how long a step takes, and what is
counted. Knows the scheduler's public face, and of the cache what ``cache/inspect.py`` tells. Clocks
come in as arguments; nothing here depends on what they say but the seconds that are reported.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.base import CapacityError, ConfigError, OctavoError, floor_to
from octavo.cache.index.policy import DEFAULT_POLICY
from octavo.cache.inspect import count_bytes, count_pages
from octavo.cache.layout import PROFILES, CacheLayout, solve_layout
from octavo.cache.report import HitExplanation, MissCause
from octavo.plan.planner import read_model
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.sim.checkers import CacheWatch, check_finished, check_output, check_peak
from octavo.sim.fake import FakeRunner
from octavo.sim.traces import History, TraceRequest, Vocabulary
from octavo.spec.stream import CacheDtypes

FORGOTTEN = "forgotten"
"""Cause of a miss that the cache takes for a prefix it never had, though the trace knows better: it
was evicted so long ago that its ghost is gone, too, or another request was still computing it.
"""

Clock = Callable[[], float]
"""Seconds of processor time since some moment."""


class TrafficError(OctavoError):
    """The scheduler could not go on although requests are waiting."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How traffic is driven. Raises ConfigError for a wrong value.

    closed: so many requests are unfinished at any time, each ended one making room for the next,
        whenever the trace says they arrived; None lets them arrive when it does, ``speed`` times as
        fast.
    max_running: most requests in a step; None is ``closed``, or 256.
    max_num_batched_tokens: most tokens computed in a step.
    step_seconds, tokens_per_second: a step takes the first, and so long as its tokens take at this
        rate. That decides how many requests are there at once, and the times that are reported.
    checkpoint_interval: tokens between regular resume points, or None.
    hash_seed: of the prefix index.
    """

    closed: int | None = 8
    speed: float = 1.0
    max_running: int | None = None
    max_num_batched_tokens: int = 8192
    step_seconds: float = 0.01
    tokens_per_second: float = 20_000.0
    checkpoint_interval: int | None = None
    hash_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("closed", "max_running", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in ("speed", "tokens_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if not self.step_seconds >= 0:
            raise ConfigError(f"step_seconds must be at least 0, not {self.step_seconds}")

    @property
    def rows(self) -> int:
        """Most requests in a step."""
        return self.max_running or self.closed or 256

    def seconds(self, tokens: int) -> float:
        """How long a step of so many tokens takes."""
        return self.step_seconds + tokens / self.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class Misses:
    """Requests with one cause of their miss. tokens: those that an unlimited cache would have
    spared them, and this one did not.
    """

    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Processor time: adding requests, planning steps and taking receipts are scheduler and cache;
    the driver is all the rest.
    """

    add: float
    schedule: float
    commit: float
    driver: float

    @property
    def manager(self) -> float:
        """Scheduler and cache."""
        return self.add + self.schedule + self.commit


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds to the first token by the model of a step's length, from arrival on; waiting: most
    requests that waited at once; end: when the last token came.
    """

    mean: float
    p50: float
    p95: float
    waiting: int
    end: float


@dataclass(frozen=True, kw_only=True)
class TrafficReport:
    """What became of a trace.

    memory: bytes asked for; arena: bytes in slabs. requests: served; refused: those too long for
    the model or the memory.
    prompt_tokens, hit_tokens: of served requests, at their first admission. possible_tokens: what
        an unlimited cache that has every prompt from its arrival on would have spared, in whole
        hash units. Resume points, which layers that let go need, are not asked about.
    misses: by cause: words of ``MissCause``, and ``forgotten``. limited: tokens that growing groups
        had and that these groups could not resume at, by law; a miss counts for each.
    evictions: hash units that the index let go. preemptions, recomputed_tokens: requests that lost
        their pages, and what was computed more than once. peak_held: most bytes that requests held
        at once; peak_used: cached ones, too.
    """

    memory: int
    arena: int
    eviction: str
    hash_unit: int
    requests: int
    refused: int
    requests_with_hits: int
    steps: int
    prompt_tokens: int
    hit_tokens: int
    possible_tokens: int
    output_tokens: int
    misses: dict[str, Misses]
    limited: dict[str, int]
    evictions: int
    preemptions: int
    recomputed_tokens: int
    peak_held: int
    peak_used: int
    waits: Waits
    seconds: Seconds
    checked_entries: int

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that came from the cache."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def possible_rate(self) -> float:
        """Part of all prompt tokens that an unlimited cache would have had."""
        return self.possible_tokens / max(1, self.prompt_tokens)

    @property
    def step_microseconds(self) -> float:
        """Scheduler and cache, on average over all steps."""
        return self.seconds.manager / max(1, self.steps) * 1e6

    def to_json(self) -> dict[str, Any]:
        """Everything, rates included, as JSON has it."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "possible_rate": self.possible_rate,
            "step_microseconds": self.step_microseconds,
            "manager_seconds": self.seconds.manager,
        }


# -- devices ---------------------------------------------------------------------------------------


class Device(Protocol):
    """What takes the place of the model."""

    def add(self, request: Request, answer: np.ndarray) -> None:
        """A request is queued, and this is what it will answer."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry a step out."""

    def received(self, plan: StepPlan, changed: Sequence[Request]) -> None:
        """The scheduler has taken the step's receipt, which changed these requests."""

    @property
    def checked_entries(self) -> int:
        """Entries that were read and found to be right."""


class Player:
    """Says what the trace says. Computes and checks nothing."""

    checked_entries = 0

    def __init__(self) -> None:
        self._answers: dict[str, np.ndarray] = {}

    def add(self, request: Request, answer: np.ndarray) -> None:
        """Keep the answer until the request ends."""
        self._answers[request.request_id] = answer

    def execute(self, plan: StepPlan) -> StepResult:
        """The next token of every request that is to get one."""
        names, places = plan.request_ids, plan.output_len
        tokens = {
            names[index]: int(self._answers[names[index]][places[index]])
            for index in plan.samples.nonzero()[0].tolist()
        }
        return StepResult(step=plan.step, tokens=tokens)

    def received(self, plan: StepPlan, changed: Sequence[Request]) -> None:
        """Forget those that have ended."""
        for request in changed:
            if request.finished:
                del self._answers[request.request_id]


class CheckedPlayer:
    """Says what the trace says, on shadow memory: every entry that a step reads must be the right
    one, and nothing may be written that others still need. All invariants are checked after every
    step. Slow.
    """

    def __init__(self, layout: CacheLayout, scheduler: Scheduler) -> None:
        self._scheduler, self._longest = scheduler, layout.max_model_len
        self._live: dict[str, Request] = {}
        self._runner = FakeRunner(layout, watch=CacheWatch(scheduler, self._live))

    @property
    def checked_entries(self) -> int:
        """Entries that were read and found to be right."""
        return self._runner.entries_read

    def add(self, request: Request, answer: np.ndarray) -> None:
        """Tell the shadow memory what is true of the request."""
        self._live[request.request_id] = request
        self._runner.register(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            request.cache_salt,
            answer=answer.tolist(),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry a step out on shadow memory. Raises Violation where anything is wrong."""
        result = self._runner.execute(plan)
        self._scheduler.check()
        for name in plan.request_ids:
            check_peak(self._scheduler, self._live[name])
        return result

    def received(self, plan: StepPlan, changed: Sequence[Request]) -> None:
        """Compare what requests have got with what they should have."""
        self._runner.settle(plan.step)
        self._scheduler.check()
        for request in changed:
            truth = self._runner.truths[request.request_id]
            check_output(request, truth)
            if request.finished:
                check_finished(request, truth, max_model_len=self._longest, aborted=False)
                self._runner.forget(request.request_id)
                del self._live[request.request_id]


# -- one run ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Tally:
    """Counters of one run."""

    served: int = 0
    refused: int = 0
    with_hits: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    possible_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    peak_held: int = 0
    peak_used: int = 0
    peak_waiting: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)
    add: float = 0.0
    schedule: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Served:
    """A request that was added. came: when. possible: tokens that an unlimited cache has of it."""

    came: float
    possible: int


class _Run:
    """One trace, one scheduler and one cache."""

    def __init__(
        self,
        layout: CacheLayout,
        requests: Sequence[TraceRequest],
        load: Load,
        *,
        clock: Clock,
        eviction: str,
        check: bool,
    ) -> None:
        self._layout, self._load, self._clock = layout, load, clock
        self._vocabulary = Vocabulary(requests)
        self._coming = deque(enumerate(requests))
        if load.closed is None:
            self._coming = deque(sorted(self._coming, key=lambda each: each[1].arrival))
        self.scheduler = Scheduler(
            layout,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_num_seqs=load.rows,
            checkpoint_interval=load.checkpoint_interval,
            hash_seed=load.hash_seed,
            eviction=eviction,
        )
        self.device: Device = CheckedPlayer(layout, self.scheduler) if check else Player()
        self._history = History()
        self._served: dict[str, _Served] = {}
        self._first_tokens: list[float] = []
        self._now = 0.0
        self._refusal = ""
        self.tally = _Tally()

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Until every request has ended. on_progress: is told how many more requests are over.

        Raises CapacityError where none of them can be served.
        """
        tally, scheduler, clock = self.tally, self.scheduler, self._clock
        while self._coming or scheduler.has_work:
            over = tally.refused
            self._arrive()
            began = clock()
            plan = scheduler.schedule()
            tally.schedule += clock() - began
            if plan is None:
                self._wait()
                on_progress(tally.refused - over)
                continue
            self._look()
            result = self.device.execute(plan)
            self._now += self._load.seconds(plan.num_tokens)
            began = clock()
            changed = scheduler.commit(result)
            tally.commit += clock() - began
            tally.steps += 1
            tally.computed_tokens += plan.num_tokens
            self.device.received(plan, changed)
            on_progress(self._count(changed) + tally.refused - over)
        if not tally.served:
            raise CapacityError(
                f"none of the trace's {tally.refused:,} requests can be served; the last one:"
                f" {self._refusal}"
            )

    def _arrive(self) -> None:
        """Add the requests whose time has come."""
        load = self._load
        while self._coming:
            index, request = self._coming[0]
            arrival = request.arrival / load.speed
            if load.closed is None:
                if arrival > self._now:
                    return
            elif len(self._served) >= load.closed:
                return
            self._coming.popleft()
            self._add(index, request, arrival if load.closed is None else self._now)

    def _add(self, index: int, asked: TraceRequest, came: float) -> None:
        prompt = self._vocabulary.tokens(asked.prompt)
        request = Request(
            request_id=f"request {index}",
            prompt_token_ids=prompt.tolist(),
            params=SamplingParams(temperature=0, max_tokens=asked.output_length, ignore_eos=True),
            priority=asked.priority,
            cache_salt=asked.salt,
            marks=asked.marks,
        )
        length, longest = len(prompt) + asked.output_length, self._layout.max_model_len
        began = self._clock()
        try:
            if length > longest:
                raise CapacityError(f"{length:,} tokens are beyond max_model_len {longest:,}")
            self.scheduler.add(request)
        except CapacityError as error:
            self.tally.refused += 1
            self._refusal = str(error)
            return
        self.tally.add += self._clock() - began
        self.device.add(request, self._vocabulary.answer(index, asked))
        possible = min(self._history.match(asked), len(prompt) - 1)
        self._history.add(asked)
        self._served[request.request_id] = _Served(
            came=came, possible=floor_to(possible, self._layout.hash_unit)
        )

    def _wait(self) -> None:
        """Nothing can run: go on to the next arrival. Raises TrafficError where there is none."""
        if self._load.closed is None and self._coming and not self.scheduler.has_work:
            self._now = max(self._now, self._coming[0][1].arrival / self._load.speed)
        elif self.scheduler.has_work:
            raise TrafficError(
                f"nothing can be scheduled though {self.scheduler.num_waiting} requests wait and"
                f" {self.scheduler.num_running} run"
            )

    def _look(self) -> None:
        tally, full = self.tally, count_bytes(self.scheduler.cache)
        held = full.held + full.limbo
        tally.peak_held = max(tally.peak_held, held)
        tally.peak_used = max(tally.peak_used, held + full.cached)
        tally.peak_waiting = max(tally.peak_waiting, self.scheduler.num_waiting)

    def _count(self, changed: Sequence[Request]) -> int:
        """Take note of first tokens and of ends; returns how many have ended."""
        ended = 0
        for request in changed:
            if len(request.output_token_ids) == 1:
                self._first_tokens.append(self._now - self._served[request.request_id].came)
                self._explain(request)
            if request.finished:
                del self._served[request.request_id]
                self.tally.output_tokens += len(request.output_token_ids)
                ended += 1
        return ended

    def _explain(self, request: Request) -> None:
        tally, hit = self.tally, request.num_cached_tokens
        possible = self._served[request.request_id].possible
        tally.served += 1
        tally.with_hits += hit > 0
        tally.prompt_tokens += len(request.prompt_token_ids)
        tally.hit_tokens += hit
        tally.possible_tokens += possible
        why = self.scheduler.explain(request.request_id)
        assert why is not None, "a request that has just got a token can be explained"
        cause = _cause(why, possible)
        tally.causes[cause] += 1
        tally.missed[cause] += max(0, possible - hit)
        limit = floor_to(request.num_tokens - 1, self._layout.hash_unit)
        if why.cause is MissCause.NO_CHECKPOINT:
            for law in dict.fromkeys(why.limited_by):
                tally.limited[law] += min(why.matched_tokens, limit) - hit

    def report(self, *, memory: int, eviction: str, seconds: float) -> TrafficReport:
        """What was counted, in ``seconds`` of processor time altogether."""
        tally, cache = self.tally, self.scheduler.cache
        needed = tally.prompt_tokens - tally.hit_tokens + tally.output_tokens - tally.served
        manager = tally.add + tally.schedule + tally.commit
        firsts = sorted(self._first_tokens) or [0.0]
        return TrafficReport(
            memory=memory,
            arena=count_bytes(cache).total,
            eviction=eviction,
            hash_unit=self._layout.hash_unit,
            requests=tally.served,
            refused=tally.refused,
            requests_with_hits=tally.with_hits,
            steps=tally.steps,
            prompt_tokens=tally.prompt_tokens,
            hit_tokens=tally.hit_tokens,
            possible_tokens=tally.possible_tokens,
            output_tokens=tally.output_tokens,
            misses={
                cause: Misses(requests=count, tokens=tally.missed[cause])
                for cause, count in tally.causes.most_common()
            },
            limited=dict(tally.limited.most_common()),
            evictions=count_pages(cache).evicted_nodes,
            preemptions=self.scheduler.num_preemptions,
            recomputed_tokens=tally.computed_tokens - needed,
            peak_held=tally.peak_held,
            peak_used=tally.peak_used,
            waits=Waits(
                mean=sum(firsts) / len(firsts),
                p50=firsts[ceil(0.5 * len(firsts)) - 1],
                p95=firsts[ceil(0.95 * len(firsts)) - 1],
                waiting=tally.peak_waiting,
                end=self._now,
            ),
            seconds=Seconds(
                add=tally.add,
                schedule=tally.schedule,
                commit=tally.commit,
                driver=seconds - manager,
            ),
            checked_entries=self.device.checked_entries,
        )


def _cause(why: HitExplanation, possible: int) -> str:
    if why.cause is MissCause.NEVER_CACHED and possible > why.matched_tokens:
        return FORGOTTEN
    return str(why.cause)


def send(
    layout: CacheLayout,
    requests: Sequence[TraceRequest],
    load: Load,
    *,
    clock: Clock,
    memory: int | None = None,
    eviction: str = DEFAULT_POLICY,
    check: bool = False,
    on_progress: Callable[[int], None] = lambda over: None,
) -> TrafficReport:
    """Send a trace through scheduler and cache.

    clock: processor time, for the seconds in the report. memory: bytes that the layout was made
    for, to be reported; those of its slabs unless given. eviction: one of ``POLICIES``. check: on
    shadow memory that verifies every read and write, slowly. on_progress: is told how many more
    requests are over.

    Raises ConfigError for an unknown policy or a trace that has too many different tokens,
    CapacityError where no request of it can be served; with ``check`` Violation, an AssertionError,
    where the cache is wrong.
    """
    began = clock()
    run = _Run(layout, requests, load, clock=clock, eviction=eviction, check=check)
    run.run(on_progress)
    slabs = layout.arena.num_slabs * layout.arena.slab_units * layout.arena.unit_bytes
    return run.report(memory=memory or slabs, eviction=eviction, seconds=clock() - began)


def layout_for(
    config: str | Path,
    *,
    memory: int,
    profile: str = "gpu",
    dtypes: CacheDtypes | None = None,
    max_model_len: int | None = None,
) -> CacheLayout:
    """The layout of a model's cache in so much memory, as ``octavo plan`` has it.

    Raises what ``octavo.plan.planner.read_model`` and ``solve_layout`` raise.
    """
    if profile not in PROFILES:
        raise ConfigError(f"profile {profile!r} is not known; known: {', '.join(PROFILES)}")
    model = read_model(config, dtypes=dtypes or CacheDtypes(), max_model_len=max_model_len)
    return solve_layout(
        model.groups,
        arena_bytes=memory,
        profile=PROFILES[profile],
        hash_unit=model.spec.hash_unit,
        max_model_len=model.spec.max_model_len,
    )
