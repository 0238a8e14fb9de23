"""Coordinator and prefix index against a slow obvious model, with shadow memory under them.

Owns a Hypothesis state machine over two-token vocabularies and tiny blocks. The model is a set of
known prefixes and a set of claimed grains; the hit must be the largest number of tokens at which
every group can resume, never more and never less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.base import block_range
from octavo.cache.coordinator import KVCacheCoordinator
from octavo.cache.hashing import NO_KEYS, PrefixHasher, root_key
from octavo.cache.layout import CacheLayout, nests
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import StepPlan
from octavo.sim.fake import FakeRunner
from octavo.sim.model import ToyGroup, toy_layout
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Snapshot, Tail, Window

LONGEST = 24
ROWS = 3

LAWS: tuple[Law, ...] = (
    Everything(),
    Window(5),
    Window(2),
    Chunk(4),
    SinkWindow(2, 3),
    Tail(3, 1),
    Snapshot(),
)


@dataclass(kw_only=True)
class Running:
    """One request: its tokens (all known beforehand), how many are computed, and how far growing
    groups are shared.
    """

    name: str
    tokens: tuple[int, ...]
    done: int
    shared: int


class ObviousIndex:
    """What the index should know: prefixes by their tokens, and grains (unit prefix, group, grain)
    claimed by resume points.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.units: set[tuple[int, ...]] = set()
        self.claimed: set[tuple[tuple[int, ...], int, int]] = set()

    def _grains(
        self, tokens: tuple[int, ...], group: int, n: int
    ) -> set[tuple[tuple[int, ...], int, int]]:
        unit = self.layout.hash_unit
        size = min(unit, self.layout.groups[group].block_tokens)
        needed = {
            grain
            for interval in self.layout.groups[group].group.law.needs(n)
            for grain in block_range(interval, size)
        }
        return {(tokens[: (grain * size // unit + 1) * unit], group, grain) for grain in needed}

    def publish(self, tokens: tuple[int, ...], n: int) -> None:
        unit = self.layout.hash_unit
        self.units |= {tokens[: count * unit] for count in range(1, n // unit + 1)}

    def claim(self, tokens: tuple[int, ...], n: int) -> None:
        for index, group in enumerate(self.layout.groups):
            if group.group.law.prefix is not None:
                self.claimed |= self._grains(tokens, index, n)

    def matched(self, tokens: tuple[int, ...]) -> int:
        unit, count = self.layout.hash_unit, 0
        while (count + 1) * unit <= len(tokens) and tokens[: (count + 1) * unit] in self.units:
            count += 1
        return count

    def hit(self, tokens: tuple[int, ...], limit: int) -> int:
        """Largest number of units at which every group can resume, tried one by one from the
        longest down.
        """
        for count in range(min(limit, self.matched(tokens)), 0, -1):
            bounded = [
                i
                for i, group in enumerate(self.layout.groups)
                if group.group.law.prefix is not None
            ]
            if all(
                self._grains(tokens, index, count * self.layout.hash_unit) <= self.claimed
                for index in bounded
            ):
                return count
        return 0


class PrefixMachine(RuleBasedStateMachine):
    """Requests start, go on chunk by chunk, leave resume points and end, in any order."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        laws = data.draw(
            st.lists(st.sampled_from(LAWS), min_size=1, max_size=3, unique=True), label="laws"
        )
        unit = data.draw(st.integers(1, 4), label="hash_unit")
        sizes = st.sampled_from([size for size in range(1, 5) if nests(size, unit)])
        toys = [
            ToyGroup(
                law=law,
                block_tokens=data.draw(sizes),
                entry_bytes=64 * data.draw(st.integers(1, 2)),
            )
            for law in laws
        ]
        # Never full: with evictions the model would have to know the policy, and the simulator
        # covers those.
        self.layout = toy_layout(
            toys, hash_unit=unit, slab_pages=2, num_slabs=1500, max_model_len=LONGEST
        )
        self.cache = KVCacheCoordinator(self.layout, rows=ROWS)
        self.model = ObviousIndex(self.layout)
        self.runner = FakeRunner(self.layout)
        self.running: dict[int, Running] = {}
        self.step = 0
        self.made = 0
        self.past: list[tuple[int, ...]] = [()]

    def keys(self, tokens: tuple[int, ...]) -> np.ndarray:
        hasher = PrefixHasher(unit=self.layout.hash_unit, seed=0)
        return hasher.extend(NO_KEYS, np.array(tokens, np.int32), root=root_key(seed=0))

    @precondition(lambda self: len(self.running) < ROWS)
    @rule(data=st.data(), fresh=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, data: st.DataObject, fresh: list[int]) -> None:
        past = data.draw(st.sampled_from(self.past), label="past")
        tokens = (*past[: data.draw(st.integers(0, len(past)), label="kept")], *fresh)[:LONGEST]
        limit = (len(tokens) - 1) // self.layout.hash_unit
        match = self.cache.lookup(self.keys(tokens), limit)
        assert match.matched == self.model.matched(tokens)
        assert match.hit == self.model.hit(tokens, limit)
        assert match.hit <= min(match.reach)
        row = min(set(range(ROWS)) - set(self.running))
        self.cache.adopt(row, match)
        name = f"r{self.made}"
        self.made += 1
        self.past.append(tokens)
        self.runner.register(name, tokens, SamplingParams())
        done = match.hit * self.layout.hash_unit
        self.running[row] = Running(
            name=name, tokens=tokens, done=done, shared=match.matched * self.layout.hash_unit
        )

    @precondition(
        lambda self: any(request.done < len(request.tokens) for request in self.running.values())
    )
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def advance(self, data: st.DataObject, chunk: int) -> None:
        rows = sorted(
            row for row, request in self.running.items() if request.done < len(request.tokens)
        )
        row = data.draw(st.sampled_from(rows), label="row")
        request, unit = self.running[row], self.layout.hash_unit
        start, stop = request.done, min(request.done + chunk, len(request.tokens))
        places = [mark for mark in range(start + 1, stop + 1) if mark % unit == 0]
        marks = (
            data.draw(st.lists(st.sampled_from(places), unique=True, max_size=2), label="marks")
            if places
            else []
        )
        plans = self.cache.plan(row, start, stop, marks=sorted(marks), shared=request.shared)
        assert self.cache.extend(plans, self.step)
        self.runner.execute(self.step_plan(row, start, stop))
        request.done = stop
        self.receive(row, stop, sorted(marks))
        self.cache.pool.retire(self.step)
        self.step += 1

    def step_plan(self, row: int, start: int, stop: int) -> StepPlan:
        request = self.running[row]
        rows, query_start = np.array([row], np.int64), np.array([0, stop - start], np.int32)
        groups = self.cache.underway.take_groups(rows, np.array([start]), query_start)
        return StepPlan(
            step=self.step,
            request_ids=(request.name,),
            token_ids=np.array(request.tokens[start:stop], np.int32),
            query_start=query_start,
            start=np.array([start], np.int32),
            stop=np.array([stop], np.int32),
            samples=np.array([stop == len(request.tokens)]),
            sampling=(SamplingParams(),),
            output_len=np.array([0], np.int32),
            branch=np.array([0], np.int32),
            groups=groups,
            copies=self.cache.underway.take_copies(),
        )

    def receive(self, row: int, stop: int, marks: list[int]) -> None:
        """The receipt: publish what is computed, and make the marks resume points."""
        request = self.running[row]
        self.cache.publish(row, self.keys(request.tokens[:stop]), self.step)
        self.model.publish(request.tokens, stop)
        assert all(
            set(kept) == set(self.cache.bounded) for kept in self.cache.promised(row).values()
        )
        assert not self.cache.bounded or set(self.cache.promised(row)) == set(marks)
        self.cache.claim_promised(row, stop, stop, None)
        for mark in marks:
            self.model.claim(request.tokens, mark)
        self.runner.settle(self.step)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)), label="row")
        self.cache.clear(row, None)
        self.runner.forget(self.running.pop(row).name)

    def check(self) -> None:
        planned = np.zeros(ROWS, np.int64)
        for row, request in self.running.items():
            planned[row] = request.done
        self.cache.check(planned)

    @invariant()
    def conserve(self) -> None:
        if hasattr(self, "cache"):
            self.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for row in sorted(self.running):
                self.cache.clear(row, None)
            self.running.clear()
            self.check()
            self.cache.index.clear()
            assert self.cache.pool.free_slabs == self.layout.arena.num_slabs, (
                "everything comes back"
            )


TestPrefixModel = PrefixMachine.TestCase
TestPrefixModel.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
