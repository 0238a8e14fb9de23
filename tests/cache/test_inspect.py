"""Snapshots of the cache against the pool's counters, against a ledger of every allocation, and
against plain set arithmetic.

Owns the ledger: whose every page is, noted when it is allocated and moved. States come from
simulated traffic with trouble.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from octavo.base import NO_PAGE, blocks_of
from octavo.cache.inspect import CacheSnapshot, count_pages, inspect
from octavo.cache.manager import KVCacheManager
from octavo.memory.layout import ArenaLayout
from octavo.memory.page import Moves
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepResult
from octavo.sim.world import CALM, World
from tests.cache.drive import gemma_layout, make_request, run

WORLDS = [(seed, model) for model in (None, "all-laws", "windows-everything") for seed in range(5)]
"""Seeds and toy models; None draws one. Many groups on toy pages share buckets."""
STATES = {".": "free", "h": "held", "c": "cached", "l": "limbo"}


class Ledger:
    """Whose every page of a cache is, by watching allocations and moves."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.owner: dict[int, int] = {}
        self.pool, self.moved = cache.coordinator.pool, 0
        self._allocate, self._compact = self.pool.allocate, self.pool.compact
        self._turn, self._decoding = -1, False
        decode = cache.coordinator.decode

        def noted(*args: Any) -> bool:
            """Decoding allocates for every group in its turn."""
            self._turn, self._decoding = -1, True
            done = decode(*args)
            self._decoding = False
            return done

        cache.coordinator.decode = noted  # type: ignore[method-assign]
        self.pool.allocate, self.pool.compact = self.allocate, self.compact  # type: ignore[method-assign]
        for index, group in enumerate(cache.coordinator.groups):
            group.apply = self.in_turn(index, group.apply)  # type: ignore[method-assign]

    def in_turn(self, index: int, apply: Any) -> Any:
        """``apply``, with whatever it allocates noted as group ``index``'s."""

        def noted(*args: Any, **more: Any) -> Any:
            self._turn = index
            return apply(*args, **more)

        return noted

    def allocate(self, bucket: int, count: int) -> np.ndarray:
        pages = self._allocate(bucket, count)
        self._turn += self._decoding
        self.owner.update(dict.fromkeys(pages.tolist(), self._turn))
        return pages

    def compact(self) -> Moves | None:
        moves = self._compact()
        if moves is not None:
            self.owner |= {
                t: self.owner[s]
                for s, t in zip(moves.sources.tolist(), moves.targets.tolist(), strict=True)
            }
            self.moved += len(moves.sources)
        return moves


def pages(snapshot: CacheSnapshot, arena: ArenaLayout) -> list[tuple[int, str, str, int]]:
    """(address, state, group character, bucket) of every page of a snapshot that tells pages."""
    found = []
    slabs = snapshot.slabs
    for slab, (bucket, states, groups) in enumerate(
        zip(slabs.bucket, slabs.states, slabs.groups, strict=True)
    ):
        assert len(states) == len(groups) == (0 if bucket is None else arena.pages_per_slab(bucket))
        for place, (state, group) in enumerate(zip(states, groups, strict=True)):
            assert bucket is not None
            found.append(
                (
                    slab * arena.slab_units + place * arena.page_units[bucket],
                    STATES[state],
                    group,
                    bucket,
                )
            )
    return found


def check_slabs(snapshot: CacheSnapshot, cache: KVCacheManager, ledger: Ledger) -> Counter[str]:
    """Pages one by one against pool and ledger; totals against the pool's counters. Returns what
    was met.
    """
    met: Counter[str] = Counter()
    by_bucket: Counter[tuple[int, str]] = Counter()
    by_group: Counter[tuple[int, str]] = Counter()
    for page, state, char, bucket in pages(snapshot, cache.layout.arena):
        by_bucket[bucket, state] += 1
        met[state] += 1
        if state == "free":
            assert char == "."
        elif char == "?":
            assert state == "limbo", "only what nobody refers to may be unknown"
            met["unknown"] += 1
        else:
            by_group[int(char), state] += 1
            assert int(char) == ledger.owner[page]
    for index, bucket_snapshot in enumerate(snapshot.buckets):
        counts = asdict(cache.coordinator.pool.counts(index))
        assert {state: by_bucket[index, state] for state in counts} == counts
        assert {state: getattr(bucket_snapshot, state) for state in counts} == counts
        assert bucket_snapshot.slabs == snapshot.slabs.bucket.count(index)
    for group in snapshot.groups:
        assert [by_group[group.index, state] for state in ("held", "cached", "limbo")] == [
            group.held,
            group.cached,
            group.limbo,
        ]
    assert (
        snapshot.arena.free_slabs
        == snapshot.slabs.bucket.count(None)
        == cache.coordinator.pool.free_slabs
    )
    return met


def referred(cache: KVCacheManager, row: int, index: int) -> set[int]:
    """What a row refers to in a group, by looking at every place that can hold a reference."""
    coordinator = cache.coordinator
    promised = [
        page
        for promises in coordinator.promised(row).values()
        if index in promises
        for page in promises[index].pages.tolist()
    ]
    extra = coordinator.chains.extra(row, index).tolist()
    return {*coordinator.groups[index].table[row].tolist(), *promised, *extra} - {NO_PAGE}


def check_requests(snapshot: CacheSnapshot, world: World) -> None:
    """Every running request is there with what its rows refer to; together they hold what the pool
    says is held.
    """
    cache = world.scheduler.cache
    running = {name for name, request in world.live.items() if cache.running(request)}
    assert {request.request_id for request in snapshot.requests} == running
    held: list[set[int]] = [set() for _ in snapshot.groups]
    for seen in snapshot.requests:
        request = world.live[seen.request_id]
        assert (seen.tokens, seen.computed) == (request.num_tokens, cache.computed(request))
        assert seen.cached_tokens == request.num_cached_tokens
        for holding, group in zip(seen.groups, cache.layout.groups, strict=True):
            mine = referred(cache, cache.row(request), holding.group)
            held[holding.group] |= mine
            assert holding.pages == len(mine)
            assert holding.bytes == len(mine) * group.page_units * cache.layout.arena.unit_bytes
            needed = {block for first, end in holding.needs for block in range(first, end)}
            assert needed == set(
                blocks_of(group.group.law.needs(seen.computed), group.block_tokens)
            )
    assert [len(one) for one in held] == [group.held for group in snapshot.groups]


def check_summaries(snapshot: CacheSnapshot, cache: KVCacheManager) -> None:
    """Counts per slab and the cheap counters say the same as the pages."""
    brief = inspect(cache, max_pages=-1)
    for bucket, states, groups, rows in zip(
        snapshot.slabs.bucket,
        snapshot.slabs.states,
        snapshot.slabs.groups,
        brief.slabs.counts,
        strict=True,
    ):
        expected = Counter(pair for pair in zip(groups, states, strict=True) if pair[1] != ".")
        got = {
            ("?" if group is None else str(group), state): count
            for group, *counts in rows
            for state, count in zip("hcl", counts, strict=True)
            if count
        }
        assert got == expected, bucket
    assert brief.slabs.states == brief.slabs.groups == ()
    counted = count_pages(cache)
    assert counted.buckets == tuple(
        cache.coordinator.pool.counts(b) for b in range(len(snapshot.buckets))
    )
    assert [(g.held, g.cached, g.limbo) for g in counted.groups] == [
        (g.held, g.cached, g.limbo) for g in snapshot.groups
    ]
    assert (
        counted.evicted_nodes
        == snapshot.index.evicted_nodes
        == cache.coordinator.index.evicted_nodes
    )
    assert counted.free_slabs == snapshot.arena.free_slabs


def settled(cache: KVCacheManager) -> bytes:
    """Everything a cache knows, as bytes that are equal where it is unchanged."""
    return pickle.dumps(cache)


def test_snapshots_agree_with_pool_ledger_and_tables_in_any_traffic() -> None:
    met: Counter[str] = Counter()
    for seed, model in WORLDS:
        world = World(seed=seed, config=model)
        cache = world.scheduler.cache
        ledger = Ledger(cache)
        shared = len(cache.layout.groups) > len(cache.layout.arena.page_units)
        for tick in range(40):
            world.tick(world.weather if tick < 34 else CALM)
            snapshot = inspect(cache)
            met += check_slabs(snapshot, cache, ledger)
            check_requests(snapshot, world)
            check_summaries(snapshot, cache)
            assert snapshot.moved_pages == ledger.moved
            met["shared buckets"] += shared
            met["resume points"] += snapshot.index.resume_points
        met["compactions"] += count_pages(cache).compactions
        met["evictions"] += count_pages(cache).evicted_nodes
    wanted = {
        "held",
        "cached",
        "limbo",
        "free",
        "unknown",
        "shared buckets",
        "compactions",
        "evictions",
        "resume points",
    }
    assert wanted == {name for name in wanted if met[name]}, (
        "the traffic must bring everything that a snapshot tells apart"
    )


@pytest.mark.parametrize("seed", [1, 5, 8])
def test_looking_changes_nothing(seed: int) -> None:
    watched, alone = World(seed=seed), World(seed=seed)
    for _ in range(40):
        watched.tick(watched.weather)
        alone.tick(alone.weather)
        before = settled(watched.scheduler.cache)
        inspect(watched.scheduler.cache)
        inspect(watched.scheduler.cache, max_pages=0)
        count_pages(watched.scheduler.cache)
        assert settled(watched.scheduler.cache) == before
    assert watched.report() == alone.report()


def test_a_snapshot_by_hand() -> None:
    """Gemma 3 270M, a prompt of 1,000 tokens computed at once, then what its end leaves in the
    index.
    """
    scheduler = Scheduler(gemma_layout(), max_num_batched_tokens=2048, max_num_seqs=4)
    seen: list[CacheSnapshot] = []
    scheduler.add(make_request("one", range(1000), max_tokens=3))
    run(scheduler, look=lambda plan: seen.append(inspect(scheduler.cache)))
    window, growing = seen[-1].groups
    assert (window.law, window.block_tokens, window.ring, window.layers[:6]) == (
        "window 512",
        64,
        9,
        (0, 1, 2, 3, 4, 6),
    )
    assert (growing.law, growing.block_tokens, growing.ring, growing.layers) == (
        "everything",
        64,
        None,
        (5, 11, 17),
    )
    assert window.fields == growing.fields == ("k bfloat16 [1, 256]", "v bfloat16 [1, 256]")
    request = seen[-1].requests[0]
    assert (request.request_id, request.tokens, request.computed, request.cached_tokens) == (
        "one",
        1002,
        1001,
        0,
    )
    ring, table = request.groups
    assert ring.needs == ((490 // 64, 16),) and table.needs == ((0, 16),)
    assert (ring.pages, table.pages) == (window.held, growing.held) == (9, 16)
    assert ring.bytes == 9 * 64 * 15 * 1024 and table.bytes == 16 * 64 * 3 * 1024
    after = inspect(scheduler.cache)
    assert after.requests == () and after.groups[1].cached == 16 and after.groups[1].held == 0
    assert after.index.nodes == 1002 // 16 and after.index.resume_points >= 1


def test_a_snapshot_is_json() -> None:
    world = World(seed=3)
    world.safety(40)
    snapshot = inspect(world.scheduler.cache)
    again = json.loads(json.dumps(snapshot, default=vars))
    assert again == json.loads(json.dumps(asdict(snapshot)))
    assert again["slabs"]["states"] == list(snapshot.slabs.states) and any(again["slabs"]["states"])


def test_pages_that_forks_share_count_once_in_the_arena_and_for_each_request() -> None:
    scheduler = Scheduler(gemma_layout(), max_num_batched_tokens=2048, max_num_seqs=4)
    source = make_request("one", range(1000), max_tokens=50)
    scheduler.add(source)
    plan = scheduler.schedule()
    assert plan is not None
    before = inspect(scheduler.cache)
    fork = source.fork(1)
    scheduler.commit(StepResult(step=plan.step, tokens={"one": 7}))
    assert scheduler.cache.fork(source, fork)
    after = inspect(scheduler.cache)
    assert [one.request_id for one in after.requests] == ["one", fork.request_id]
    assert after.requests[0].groups == after.requests[1].groups
    assert (
        [group.held for group in after.groups] == [group.held for group in before.groups] == [9, 16]
    )
