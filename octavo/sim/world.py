"""Deterministic simulation: the real scheduler and cache, a fake runner, and trouble, all from one
seed.

Owns ``run``: a safety phase with faults (aborts, exhaustion, preemption storms, late and lost
steps, changing budgets), then healing, then a liveness phase in which every live request must
finish. Knows the scheduler's public face only. A failure names the one command that replays it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from hashlib import blake2b
from random import Random

from octavo.base import CapacityError, ConfigError, OctavoError, UnsupportedError
from octavo.cache.layout import CacheLayout
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.sim.checkers import CacheWatch, check_finished, check_output, check_peak
from octavo.sim.clients import Clients
from octavo.sim.fake import FakeRunner, Violation
from octavo.sim.model import draw_model

DEFAULT_STEPS = 100
"""Ticks of the safety phase."""


class SimulationError(OctavoError):
    """Something that must hold did not. The message ends with the command that shows it again."""


@dataclass(frozen=True, kw_only=True)
class SimReport:
    """What one seed did. Equal seeds give equal digests.

    digest: hex hash of every plan and result, addresses of pages included. outcome: the same of
        what does not depend on where pages lie: requests, the token ranges of every step, hits,
        evicted keys in order, and how requests ended.
    """

    seed: int
    model: str
    digest: str
    outcome: str
    steps: int
    requests: int
    finished: int
    aborted: int
    rejected: int
    forks: int
    hits: int
    cached_tokens: int
    preemptions: int
    evictions: int
    lost_steps: int
    entries_read: int


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How rough one seed is: chances per tick, how many steps may be in flight, how many requests
    may be live.
    """

    arrival: float
    burst: int
    abort: float
    loss: float
    budget_change: float
    late: float
    depth: int
    crowd: int


CALM = Weather(arrival=0, burst=0, abort=0, loss=0, budget_change=0, late=0.2, depth=2, crowd=0)
"""After healing: nobody arrives, nothing fails, completions may still be late."""


def _rng(seed: int, purpose: str) -> Random:
    """A generator of its own for every purpose, so that one draw more in one place leaves the
    others alone.
    """
    return Random(f"octavo/{seed}/{purpose}")


def _draw_weather(rng: Random) -> Weather:
    return Weather(
        arrival=rng.choice((0.1, 0.3, 0.6)),
        burst=rng.choice((1, 1, 3, 8)),
        abort=rng.choice((0.0, 0.02, 0.1)),
        loss=rng.choice((0.0, 0.0, 0.02, 0.08)),
        budget_change=rng.choice((0.0, 0.05)),
        late=rng.choice((0.0, 0.3, 0.6)),
        depth=rng.choice((1, 2, 2)),
        crowd=rng.choice((2, 6, 12, 20)),
    )


@dataclass(kw_only=True)
class _Tally:
    """Counters of one run."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    forks: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    lost_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A step handed to the runner whose receipt the scheduler has not seen."""

    plan: StepPlan
    result: StepResult


class World:
    """One simulated server and its clients."""

    def __init__(self, *, seed: int, config: str | None = None) -> None:
        self.seed = seed
        self.model, self.layout = draw_model(_rng(seed, "model"), config)
        setup = _rng(seed, "setup")
        self.faults = _rng(seed, "faults")
        self.weather = _draw_weather(setup)
        vocab_size = setup.choice((2, 2, 3, 5))
        self.scheduler = make_scheduler(self.layout, setup)
        self.clients = Clients(
            _rng(seed, "clients"), vocab_size=vocab_size, max_model_len=self.layout.max_model_len
        )
        self.live: dict[str, Request] = {}
        self.runner = FakeRunner(
            self.layout, vocab_size=vocab_size, watch=CacheWatch(self.scheduler, self.live)
        )
        self.flights: deque[_Flight] = deque()
        self.tally = _Tally()
        self._digest, self._outcome = blake2b(digest_size=16), blake2b(digest_size=16)
        self._evicted: list[bytes] = []
        self.scheduler.cache.coordinator.index.on_evict = self._evicted.append

    # -- one tick ----------------------------------------------------------------------------------

    def tick(self, weather: Weather) -> None:
        """Arrivals and faults, then schedule, then perhaps a receipt."""
        rng = self.faults
        if rng.random() < weather.arrival:
            for _ in range(rng.randint(1, weather.burst)):
                if len(self.live) < weather.crowd:
                    self._arrive()
        if self.live and rng.random() < weather.abort:
            self._abort(rng.choice(sorted(self.live)))
        if rng.random() < weather.budget_change:
            self._change_budget(rng)
        while len(self.flights) < weather.depth and self._launch(weather):
            if rng.random() < 0.5:
                break
        crowded = len(self.flights) >= weather.depth
        if self.flights and (crowded or rng.random() >= weather.late):
            self._land()
        self.scheduler.check()

    def _arrive(self) -> None:
        request = self.clients.request()
        self.tally.requests += 1
        try:
            self.scheduler.add(request)
        except CapacityError:
            self.tally.rejected += 1
            self._note_outcome("reject", request.request_id)
            return
        self._meet(request)
        self._note("add", request.request_id)
        self._note_outcome("add", request.request_id, request.prompt_token_ids)

    def _meet(self, request: Request) -> None:
        """A request is live from now on."""
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        self.runner.register(
            request.request_id,
            request.prompt_token_ids,
            params,
            request.cache_salt,
            branch=request.branch,
            ends=frozenset(ends),
            constraint=request.constraint,
        )
        self.live[request.request_id] = request

    def _abort(self, request_id: str) -> None:
        request = self.live.pop(request_id)
        if not self.scheduler.abort(request_id):
            raise Violation(f"abort says that {request_id}, which is live, is unknown")
        if self.scheduler.abort(request_id):
            raise Violation(f"abort finds {request_id} a second time")
        check_finished(
            request,
            self.runner.truths[request_id],
            max_model_len=self.scheduler.max_model_len,
            aborted=True,
        )
        self.tally.aborted += 1
        self._note("abort", request_id)
        self._note_outcome("abort", request_id)

    def _change_budget(self, rng: Random) -> None:
        self.scheduler.max_num_batched_tokens = rng.choice((1, 3, 8, 20, 64))
        self.scheduler.max_num_seqs = rng.choice((1, 2, 4, 8))

    def _launch(self, weather: Weather) -> bool:
        """Schedule a step and run it. A step behind a lost one is lost too: the device is gone
        until its receipts are in.

        In calm weather nobody launches behind a lost step, or the losses would never end.
        """
        failing = any(flight.result.failed for flight in self.flights)
        if failing and not weather.loss:
            return False
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.tally.steps += 1
        self._note_plan(plan)
        lost = failing or self.faults.random() < weather.loss
        self.tally.lost_steps += lost
        self.flights.append(
            _Flight(plan=plan, result=self.runner.lose(plan) if lost else self.runner.execute(plan))
        )
        self.scheduler.check()
        for name in plan.request_ids:
            check_peak(self.scheduler, self.live[name])
        return True

    def _land(self) -> None:
        """Give the oldest step's receipt to the scheduler."""
        flight = self.flights.popleft()
        changed = self.scheduler.commit(flight.result)
        finished = [request for request in changed if request.finished]
        for request in changed:
            if request.branch and request.request_id not in self.live:
                self.tally.forks += 1
                self._meet(request)
        self.runner.settle(flight.plan.step)
        self._note(
            "commit", flight.result.step, sorted(flight.result.tokens.items()), flight.result.failed
        )
        self._note_outcome("commit", sorted(flight.result.tokens.items()), flight.result.failed)
        for request in self.live.values():
            check_output(request, self.runner.truths[request.request_id])
        for request in finished:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        name = request.request_id
        if self.live.pop(name, None) is not request:
            raise Violation(f"{name} is reported finished, and is not live")
        check_finished(
            request,
            self.runner.truths[name],
            max_model_len=self.scheduler.max_model_len,
            aborted=False,
        )
        self.clients.remember((*request.prompt_token_ids, *request.output_token_ids))
        self.tally.finished += 1
        self.tally.hits += request.num_cached_tokens > 0
        self.tally.cached_tokens += request.num_cached_tokens
        self.tally.preemptions += request.num_preemptions
        ended = ("finish", name, request.output_token_ids, str(request.finish_reason))
        self._note(*ended)
        self._note_outcome(*ended, request.num_cached_tokens)

    # -- two phases --------------------------------------------------------------------------------

    def safety(self, steps: int) -> None:
        """Ticks in bad weather."""
        for _ in range(steps):
            self.tick(self.weather)

    def liveness(self) -> None:
        """Heal, and demand that every live request ends within a bounded number of ticks."""
        self._heal_budget()
        tokens = sum(self._longest(request) for request in self.live.values())
        bound = 50 + 6 * tokens + 4 * len(self.live) ** 2
        for _ in range(bound):
            if not self.live and not self.flights:
                break
            before = (self.tally.steps, len(self.live), len(self.flights))
            self.tick(CALM)
            if before == (self.tally.steps, len(self.live), len(self.flights)) and not self.flights:
                raise Violation(
                    f"nothing is in flight, nothing is scheduled, and {sorted(self.live)} wait for"
                    " ever"
                )
        if self.live or self.flights:
            raise Violation(f"after {bound} calm ticks {sorted(self.live)} have not ended")
        if self.scheduler.has_work or self.scheduler.schedule() is not None:
            raise Violation("the scheduler has work though no request is live")

    def _longest(self, request: Request) -> int:
        most = request.params.max_tokens
        longest = self.scheduler.max_model_len
        return longest if most is None else min(longest, len(request.prompt_token_ids) + most)

    def _heal_budget(self) -> None:
        self.scheduler.max_num_batched_tokens = max(8, self.scheduler.max_num_batched_tokens)
        self.scheduler.max_num_seqs = max(2, self.scheduler.max_num_seqs)

    # -- the record --------------------------------------------------------------------------------

    def _note(self, *facts: object) -> None:
        self._digest.update(repr(facts).encode())

    def _note_outcome(self, *facts: object) -> None:
        """Note what has been evicted since the last note, and then ``facts``."""
        for key in self._evicted:
            self._outcome.update(repr(("evict", key.hex())).encode())
        self._evicted.clear()
        self._outcome.update(repr(facts).encode())

    def _note_plan(self, plan: StepPlan) -> None:
        self._note_outcome("step", plan.request_ids, plan.start.tolist(), plan.stop.tolist())
        self._note(
            plan.step, plan.request_ids, plan.start.tolist(), plan.stop.tolist(), plan.copies
        )
        for step in plan.groups:
            self._note(
                step.fresh.tolist(), step.write_page.tolist(), step.table[step.rows].tolist()
            )

    def report(self) -> SimReport:
        """What happened so far."""
        return SimReport(
            seed=self.seed,
            model=self.model,
            digest=self._digest.hexdigest(),
            outcome=self._outcome.hexdigest(),
            evictions=evictions(self.scheduler),
            entries_read=self.runner.entries_read,
            **asdict(self.tally),
        )


def make_scheduler(layout: CacheLayout, rng: Random) -> Scheduler:
    """The real scheduler with budgets drawn from ``rng``."""
    return Scheduler(
        layout,
        max_num_batched_tokens=rng.choice((2, 5, 16, 64)) * max(1, layout.max_model_len // 100),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_model_len=layout.max_model_len,
        enable_prefix_caching=rng.random() < 0.9,
        hash_seed=rng.getrandbits(32),
        checkpoint_interval=rng.choice((None, None, layout.hash_unit, 3 * layout.hash_unit + 1)),
    )


def evictions(scheduler: Scheduler) -> int:
    """Nodes that the prefix index let go."""
    return scheduler.cache.coordinator.index.evicted_nodes


def replay_command(*, seed: int, steps: int, config: str | None) -> str:
    """The one command that shows a seed's run again."""
    return f"octavo sim --seed {seed} --steps {steps}" + (f" --model {config}" if config else "")


def run(*, seed: int, steps: int = DEFAULT_STEPS, config: str | None = None) -> SimReport:
    """Simulate one seed: ``steps`` ticks of trouble, then healing until every request has ended.

    config: a toy model's name or the path of a ``config.json``; None draws a toy model from the
    seed. Raises SimulationError with the replay command where anything is wrong.
    """
    try:
        world = World(seed=seed, config=config)
        world.safety(steps)
        world.liveness()
    except (ConfigError, UnsupportedError):
        raise
    except Exception as error:
        command = replay_command(seed=seed, steps=steps, config=config)
        raise SimulationError(f"{type(error).__name__}: {error}\nreplay: {command}") from error
    return world.report()
