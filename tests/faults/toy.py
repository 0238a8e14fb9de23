"""A toy engine for fault scenarios: the real scheduler and cache over a runner that checks every
read and write.

Owns ``Toy`` and short names for toy groups. A model's state is stood in for by records (position,
hash of all tokens so far), so a wrong block, boundary or stale row is a mismatch without any
tensor. Knows the simulator's parts; decides nothing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.block_plan import blocks_in
from octavo.cache.layout import CacheLayout
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.sim.checkers import check_finished, check_output
from octavo.sim.fake import FakeRunner, Record, Truth
from octavo.sim.model import ToyGroup, toy_layout
from octavo.spec.law import Chunk, Everything, SinkWindow, Snapshot, Tail, Window


def full(block_tokens: int = 4, entry_bytes: int = 64) -> ToyGroup:
    """A group that never lets go."""
    return ToyGroup(law=Everything(), block_tokens=block_tokens, entry_bytes=entry_bytes)


def window(size: int, block_tokens: int = 4, entry_bytes: int = 64) -> ToyGroup:
    """A sliding window."""
    return ToyGroup(law=Window(size), block_tokens=block_tokens, entry_bytes=entry_bytes)


def state(entry_bytes: int = 64) -> ToyGroup:
    """A recurrent state."""
    return ToyGroup(law=Snapshot(), block_tokens=1, entry_bytes=entry_bytes)


def chunked(size: int, block_tokens: int = 4) -> ToyGroup:
    """Chunked local attention."""
    return ToyGroup(law=Chunk(size), block_tokens=block_tokens)


def tail(ratio: int, overlap: int, block_tokens: int = 4) -> ToyGroup:
    """A compressor's rolling state."""
    return ToyGroup(law=Tail(ratio, overlap), block_tokens=block_tokens)


def sinks(count: int, size: int, block_tokens: int = 4) -> ToyGroup:
    """Sinks and a window."""
    return ToyGroup(law=SinkWindow(count, size), block_tokens=block_tokens)


ALL_LAWS = (full(), window(6), chunked(6), sinks(1, 4), tail(4, 4), state())
"""One group of every law."""


def layout_of(
    *groups: ToyGroup, unit: int = 4, slabs: int = 200, slab_pages: int = 1, max_model_len: int = 96
) -> CacheLayout:
    """A toy layout; with the default slab of one largest page."""
    return toy_layout(
        groups, hash_unit=unit, slab_pages=slab_pages, num_slabs=slabs, max_model_len=max_model_len
    )


class Toy:
    """A scheduler, a runner, and every step's receipt in the test's hands."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        budget: int = 64,
        seqs: int = 4,
        vocab_size: int = 5,
        **options: Any,
    ) -> None:
        self.layout = layout
        self.scheduler = Scheduler(
            layout, max_num_batched_tokens=budget, max_num_seqs=seqs, **options
        )
        self.runner = FakeRunner(layout, vocab_size=vocab_size)
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self._probes = 0

    @property
    def cache(self) -> Any:
        """The cache manager; Any, since some scenarios look behind its public face."""
        return self.scheduler.cache

    @property
    def pool(self) -> Any:
        """The page pool."""
        return self.cache.coordinator.pool

    # -- requests

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        seed: int | None = None,
        n: int = 1,
        **more: Any,
    ) -> Request:
        """Queue a greedy request (with ``n`` > 1, of which every continuation has a truth of its
        own).
        """
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=seed, n=n
        )
        request = Request(request_id=name, prompt_token_ids=list(prompt), params=params, **more)
        self.scheduler.add(request)
        self.runner.register(name, request.prompt_token_ids, params, request.cache_salt)
        self.requests[name] = request
        return request

    def serve(self, name: str, prompt: Sequence[int], **more: Any) -> Request:
        """Run one request to its end, with all that is already queued."""
        request = self.add(name, prompt, **more)
        self.run()
        return request

    def abort(self, name: str) -> None:
        """Abort a request wherever it is."""
        assert self.scheduler.abort(name)
        self.scheduler.check()
        check_finished(
            self.requests[name],
            self.runner.truths[name],
            max_model_len=self.scheduler.max_model_len,
            aborted=True,
        )

    def retract(self, name: str, *, cold: bool = False, publish: bool = True) -> None:
        """Take a running request's pages, as the scheduler does where memory runs out."""
        queued = self.scheduler._requests[name]
        self.scheduler._preempt(queued, cold=cold, publish=publish)
        self.scheduler.check()

    # -- steps

    def launch(self, *, lost: bool = False) -> StepPlan | None:
        """Plan and run one step; its receipt waits."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self._assert_shared_rows_stay(plan)
            self.flights.append(
                (plan, self.runner.lose(plan) if lost else self.runner.execute(plan))
            )
        return plan

    def land(self) -> list[Request]:
        """Hand in the oldest receipt; what has been generated so far must be what a cold run
        generates.
        """
        plan, result = self.flights.popleft()
        changed = self.scheduler.commit(result)
        self.runner.settle(plan.step)
        self.scheduler.check()
        for request in changed:
            if request.request_id not in self.requests:
                self._meet_fork(request)
            truth = self.runner.truths[request.request_id]
            check_output(request, truth)
            if request.finished:
                check_finished(
                    request, truth, max_model_len=self.scheduler.max_model_len, aborted=False
                )
        return changed

    def _meet_fork(self, request: Request) -> None:
        self.runner.register(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            request.cache_salt,
            branch=request.branch,
        )
        self.requests[request.request_id] = request

    def step(self) -> StepPlan:
        """One step and its receipt."""
        plan = self.launch()
        assert plan is not None, "something was to run"
        while self.flights:
            self.land()
        return plan

    def run(
        self,
        *,
        depth: int = 1,
        look: Callable[[StepPlan], None] = lambda plan: None,
        steps: int = 2000,
    ) -> None:
        """Run to the end with up to ``depth`` steps in flight, looking at every plan before its
        receipt.
        """
        for _ in range(steps):
            plan = self.launch() if len(self.flights) < depth else None
            if plan is not None:
                look(plan)
            elif self.flights:
                self.land()
            else:
                assert not self.scheduler.has_work, "work is left and nothing runs"
                return
        raise AssertionError(f"not finished after {steps} steps")

    # -- questions

    def held(self) -> list[int]:
        """Pages per bucket that requests hold or that wait for a receipt."""
        counts = [self.pool.counts(bucket) for bucket in range(len(self.layout.arena.page_units))]
        return [count.held + count.limbo for count in counts]

    def cached(self) -> list[int]:
        """Pages per bucket that only the prefix index keeps."""
        return [
            self.pool.counts(bucket).cached for bucket in range(len(self.layout.arena.page_units))
        ]

    def assert_idle(self) -> None:
        """Nobody holds anything; what is not cached is free."""
        assert not self.scheduler.has_work and not self.flights
        self.scheduler.check()
        assert not any(self.held()), "pages are held by nobody"

    def assert_all_free(self) -> None:
        """Idle, and once the prefixes are forgotten every slab is free again."""
        self.assert_idle()
        self.cache.clear_prefixes()
        self.scheduler.check()
        assert self.pool.free_slabs == self.layout.arena.num_slabs, "slabs are lost"

    def probe(self, tokens: Sequence[int], **more: Any) -> Any:
        """What a request with these tokens would find now; asserts that asking changes nothing."""
        self._probes += 1
        request = Request(
            request_id=f"probe {self._probes}",
            prompt_token_ids=tokens,
            params=SamplingParams(),
            **more,
        )
        before = (self.held(), self.cached(), self.pool.free_slabs)
        found = self.cache.lookup(request)
        assert before == (self.held(), self.cached(), self.pool.free_slabs), (
            "a probe changes nothing"
        )
        return found

    def hit(self, tokens: Sequence[int], **more: Any) -> int:
        """Tokens of a prompt ``tokens`` plus one other token that could be resumed now."""
        return int(self.probe([*tokens, 99], **more).hit)

    def warm_hits(self, tokens: Sequence[int]) -> list[int]:
        """Hits of every prefix of ``tokens`` that is whole units, each proven: all that its resume
        point needs lies in its pages.
        """
        unit = self.layout.hash_unit
        hits = []
        for stop in range(unit, len(tokens) + 1, unit):
            found = self.probe([*tokens[:stop], 99])
            self._assert_warm(tokens, found)
            hits.append(int(found.hit))
        return hits

    def _assert_warm(self, tokens: Sequence[int], found: Any) -> None:
        truth = Truth(prompt=tuple(tokens), params=SamplingParams(), salt="", vocab_size=2)
        coordinator = self.cache.coordinator
        for index, group in enumerate(self.layout.groups):
            needs = group.group.law.needs(found.hit)
            blocks, pages = coordinator.hits.pages_of(
                index, found.match.nodes, blocks_in(needs, coordinator.grains[index].tokens)
            )
            page_of = dict(zip(blocks.tolist(), pages.tolist(), strict=True))
            for position in (position for start, stop in needs for position in range(start, stop)):
                block, row = divmod(position, group.block_tokens)
                assert self.record(index, page_of[block], row) == truth.records[position], (
                    "a hit is warm"
                )

    def record(self, group: int, page: int, row: int) -> Record | None:
        """What lies in a row of a page, None where it is unknown or another group's."""
        found = self.runner.arena.page(page)
        return None if found is None or found.group != group else found.rows[row]

    def pages_of(self, name: str, group: int) -> dict[int, int]:
        """Block -> page of a running request, with all its planned tokens. Changes nothing."""
        table, row = self.cache.coordinator.groups[group], self.cache.row(self.requests[name])
        if self.layout.groups[group].fixed is None:
            blocks = np.flatnonzero(table.table[row] != NO_PAGE)
            return dict(zip(blocks.tolist(), table.table[row, blocks].tolist(), strict=True))
        held = table.held_blocks(row, self.cache.scheduled(self.requests[name]))
        return {block: int(table.table[row, held[block]]) for block in sorted(held)}

    def _assert_shared_rows_stay(self, plan: StepPlan) -> None:
        for group, step in enumerate(plan.groups):
            lowest: dict[int, int] = {}
            for page, row in zip(step.write_page.tolist(), step.write_row.tolist(), strict=True):
                lowest[page] = min(row, lowest.get(page, row))
            for page, row in lowest.items():
                assert page == NO_PAGE or row >= self.indexed_rows(group, page), (
                    "a row that others may read is written"
                )

    def indexed_rows(self, group: int, page: int) -> int:
        """Leading rows of a page that the prefix index offers to others."""
        coordinator = self.cache.coordinator
        grain, block_tokens, unit = (
            coordinator.grains[group],
            self.layout.groups[group].block_tokens,
            self.layout.hash_unit,
        )
        lanes, nodes = np.nonzero(coordinator.index.pages[grain.lanes] == page)
        rows = 0
        for lane, node in zip(lanes.tolist(), nodes.tolist(), strict=True):
            depth = int(coordinator.index._depth[node])
            stop = (depth - 1) * unit + (
                lane + 1 + grain.per_unit - len(grain.lanes)
            ) * grain.tokens
            rows = max(rows, (stop - 1) % block_tokens + 1)
        return rows

    def poison(self, pages: Iterable[int]) -> None:
        """Overwrite pages with records that no request has."""
        for page in pages:
            shadow = self.runner.arena.page(page)
            if shadow is not None:
                shadow.rows = [(-1, -1)] * len(shadow.rows)

    def poison_free(self) -> None:
        """Poison every page that nobody holds and nothing caches."""
        live = {
            page
            for page in self.runner.arena.pages
            if self.pool.references(page)[0] or self.pool.uses(page)[0]
        }
        self.poison(set(self.runner.arena.pages) - live)


def written(plan: StepPlan, group: int, index: int = 0) -> list[int]:
    """Positions of request ``index`` of a step whose entries one group stores."""
    part = slice(int(plan.query_start[index]), int(plan.query_start[index + 1]))
    stored = np.flatnonzero(plan.groups[group].write_page[part] != NO_PAGE)
    return (stored + int(plan.start[index])).tolist()
