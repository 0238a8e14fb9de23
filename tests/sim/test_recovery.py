"""The simulator with a scheduler that breaks anywhere: in any operation of scheduler, cache, index
and pool, before its work or after it, steps in flight or not.

The requests go on in a scheduler with an empty cache over the same arena, and their outputs are
what they would have been. Owns the world in which that happens; ``tests/engine/test_recovery.py``
does the same with the engine's own recovery.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from octavo.sched.request import FinishReason, Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.sim.checkers import CacheWatch
from octavo.sim.world import Weather, World
from tests.planted import Chance, PlantedError, operations, parts, wrapped

SEEDS = range(20)


class BreakingWorld(World):
    """A world whose scheduler breaks now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.recoveries, rng = 0, Random(f"planted/{seed}")
        self.chance = Chance(rng, rng.choice((0.0005, 0.002, 0.01)))
        self.after_tokens = self.waiting_forks = self.in_flight = 0
        self._known: dict[str, tuple[int, int]] = {}

    def tick(self, weather: Weather) -> None:
        try:
            super().tick(weather)
        except PlantedError:
            self._recover()

    def _land(self) -> None:
        super()._land()
        self._known = {
            name: (len(request.output_token_ids), len(request.scored))
            for name, request in self.live.items()
        }

    def _recover(self) -> None:
        self.recoveries += 1
        self.in_flight += bool(self.flights)
        # What the device still had to do is done: the fake one carries steps out at once.
        self.flights.clear()
        self.runner._in_flight.clear()
        for name, request in self.live.items():
            tokens, scored = self._known.get(name, (0, 0))
            self.after_tokens += tokens > 0
            self.waiting_forks += request.branch > 0
            request.rewind(tokens, scored)
        probability, self.chance.probability = self.chance.probability, 0.0
        self.scheduler = self.scheduler.successor(list(self.live.values()))
        self.chance.probability = probability
        self.runner._watch = CacheWatch(self.scheduler, self.live)


def test_requests_go_on_wherever_a_scheduler_breaks() -> None:
    raised: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for seed in SEEDS:
        world = BreakingWorld(seed)
        with wrapped(operations(parts(world.scheduler)), world.chance):
            world.safety(80)
            world.chance.probability = 0.0
            world.liveness()
        world.scheduler.check()
        pool = world.scheduler.cache.coordinator.pool
        for bucket in range(len(world.layout.arena.page_units)):
            assert pool.counts(bucket).held == pool.counts(bucket).limbo == 0
        raised += world.chance.raised
        for name in ("recoveries", "after_tokens", "waiting_forks", "in_flight"):
            met[name] += getattr(world, name)
        met["finished"] += world.tally.finished
    assert met["recoveries"] > 200 and met["in_flight"] > 50 and met["finished"] > 150
    assert met["after_tokens"] > 200 and met["waiting_forks"] > 50
    assert len(raised) > 40
    assert {"Scheduler.schedule", "Scheduler.commit", "Scheduler.add"} <= {*raised}


class InvalidWorld(World):
    """A world in which the model now and then computes numbers that are none."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._rng, self.invalid = Random(f"invalid/{seed}"), 0
        execute = self.runner.execute

        def sometimes(plan: StepPlan) -> StepResult:
            result = execute(plan)
            if self.live and self._rng.random() < 0.1:
                index = self._rng.randrange(len(plan.request_ids))
                names = frozenset({plan.request_ids[index]})
                without = names | {*plan.forks.get(index, ())}
                tokens = {
                    name: token for name, token in result.tokens.items() if name not in without
                }
                result = StepResult(
                    step=plan.step,
                    tokens=tokens,
                    logprobs=result.logprobs,
                    scored=result.scored,
                    invalid=names,
                )
            return result

        self.runner.execute = sometimes  # type: ignore[method-assign]

    def _finish(self, request: Request) -> None:
        if request.finish_reason is not FinishReason.ERROR:
            super()._finish(request)
            return
        self.invalid += 1
        assert self.live.pop(request.request_id) is request


def test_requests_with_numbers_that_are_none_end_and_their_neighbours_go_on() -> None:
    invalid = finished = 0
    for seed in SEEDS:
        world = InvalidWorld(seed)
        world.safety(60)
        world._rng = Random()
        world._rng.random = lambda: 1.0  # type: ignore[method-assign]
        world.liveness()
        invalid, finished = invalid + world.invalid, finished + world.tally.finished
    assert invalid > 30 and finished > 150


def test_nothing_of_a_request_with_invalid_numbers_stays_cached() -> None:
    layout = BreakingWorld(3).layout
    scheduler = Scheduler(layout, max_num_batched_tokens=4, max_num_seqs=2)

    def run(name: str, *, invalid: bool) -> Request:
        prompt = [1 + place % 3 for place in range(min(20, layout.max_model_len - 2))]
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(request_id=name, prompt_token_ids=prompt, params=params)
        scheduler.add(request)
        while not request.finished:
            plan = scheduler.schedule()
            assert plan is not None
            last = bool(plan.samples[0])
            names = frozenset({name}) if invalid and last else frozenset()
            tokens = {name: 1} if last and not invalid else {}
            scheduler.commit(StepResult(step=plan.step, tokens=tokens, invalid=names))
            scheduler.check()
        return request

    first = run("a", invalid=True)
    assert first.finish_reason is FinishReason.ERROR and not first.output_token_ids
    assert run("b", invalid=False).num_cached_tokens == 0
    # The same without the fault hits, or the test would prove nothing.
    assert run("c", invalid=False).num_cached_tokens > 0
