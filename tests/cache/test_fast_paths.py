"""Short cuts against the long way round: the same requests with and without them hold, write and
find the same.

Protects: a short cut changes which page is used at most, never what is held, stored or hit. That
every read finds what it should is checked by the toy's shadow memory in both runs.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.cache import hashing
from octavo.cache.coordinator import KVCacheCoordinator
from octavo.cache.hashing import NO_KEYS, PrefixHasher
from octavo.cache.index.tree import PrefixIndex
from octavo.cache.schedule import DecodeSchedule
from octavo.memory.pool import PagePool
from octavo.sched.step import StepPlan
from octavo.sim import world
from octavo.sim.model import ToyGroup
from octavo.spec.law import Chunk, Law, SinkWindow, Snapshot, Tail, Window
from tests.faults.toy import Toy, full, layout_of, state, written

LAWS: tuple[tuple[Law, int], ...] = (
    (Snapshot(), 1),
    (Tail(4, 4), 4),
    (Tail(3, 2), 8),
    (Window(12), 4),
    (Window(5), 1),
    (Window(20), 32),
    (Chunk(24), 8),
    (Chunk(20), 16),
    (SinkWindow(3, 10), 2),
    (SinkWindow(9, 6), 4),
)


def journal(*groups: ToyGroup, budget: int, depth: int) -> list[object]:
    """What requests of several lengths, one of them forked, hold and store at every step, and what
    is found afterwards.
    """
    toy, seen = (
        Toy(layout_of(*groups, unit=8, slabs=600, max_model_len=256), budget=budget, seqs=6),
        list[object](),
    )

    def look(plan: StepPlan) -> None:
        stored = [
            written(plan, group, part)
            for group in range(len(groups))
            for part in range(len(plan.request_ids))
        ]
        held = {
            (name, group): sorted(toy.pages_of(name, group))
            for name, request in toy.requests.items()
            if toy.cache.running(request)
            for group in range(len(groups))
        }
        seen.append(
            (plan.request_ids, plan.start.tolist(), plan.stop.tolist(), stored, held, toy.held())
        )

    for name, length, n in (("a", 90, 1), ("b", 33, 3), ("c", 61, 1)):
        toy.add(name, [(i * i + length) % 50 for i in range(length)], max_tokens=30, n=n)
        toy.run(depth=depth, look=look)
    for name, request in list(toy.requests.items()):
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        found = toy.probe([*tokens, 1, 2])
        seen.append((name, found.hit, found.matched, found.match.reach))
    toy.assert_all_free()
    return seen


@pytest.mark.parametrize("budget", [7, 30, 200])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_state_that_trades_pages_with_its_checkpoint_is_as_one_that_takes_new_ones(
    budget: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, traded, trade = (
        (full(), state(), ToyGroup(law=Tail(4, 4), block_tokens=4)),
        0,
        PagePool.trade,
    )

    def counted(self: PagePool, kept: np.ndarray, held: np.ndarray, step: int) -> np.ndarray:
        nonlocal traded
        mine = trade(self, kept, held, step)
        traded += int(np.count_nonzero(mine))
        return mine

    monkeypatch.setattr(PagePool, "trade", counted)
    quick = journal(*groups, budget=budget, depth=depth)
    monkeypatch.setattr(PagePool, "trade", lambda self, kept, held, step: np.zeros(len(kept), bool))
    assert quick == journal(*groups, budget=budget, depth=depth) and traded > 4


@pytest.mark.parametrize(("law", "block"), LAWS, ids=str)
@pytest.mark.parametrize("budget", [9, 40])
def test_a_chunk_over_a_steady_ring_is_as_one_over_a_ring_that_is_looked_through(
    law: Law, block: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = full(), ToyGroup(law=law, block_tokens=block)
    quick = journal(*groups, budget=budget, depth=1)
    monkeypatch.setattr(DecodeSchedule, "steady", lambda self, group, row: False)
    assert quick == journal(*groups, budget=budget, depth=1)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that knows nothing: everything is asked before every token."""
    monkeypatch.setattr(DecodeSchedule, "due", lambda self, rows, n: np.ones(len(rows), bool))
    monkeypatch.setattr(
        DecodeSchedule,
        "groups_due",
        lambda self, rows, n: np.ones((len(self._event), len(rows)), bool),
    )
    monkeypatch.setattr(DecodeSchedule, "steady", lambda self, group, row: False)


@pytest.mark.parametrize(("law", "block"), LAWS, ids=str)
def test_without_the_schedule_the_same_is_held_and_stored(
    law: Law, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = full(), ToyGroup(law=law, block_tokens=block), state()
    quick = journal(*groups, budget=20, depth=2)
    forget(monkeypatch)
    assert quick == journal(*groups, budget=20, depth=2)


@pytest.mark.parametrize("seed", range(12))
def test_without_the_schedule_a_world_ends_alike(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = world.run(seed=seed).outcome
    forget(monkeypatch)
    assert world.run(seed=seed).outcome == quick


@pytest.mark.parametrize(("law", "block"), LAWS, ids=str)
def test_a_prefix_that_ends_in_a_resume_point_is_found_as_by_looking(
    law: Law, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(
        layout_of(
            full(),
            ToyGroup(law=law, block_tokens=block),
            state(),
            unit=4,
            slabs=600,
            max_model_len=256,
        )
    )
    tokens = list(range(70))
    for stop in (19, 41, 44, 70):
        toy.serve(f"r{stop}", tokens[:stop], max_tokens=5)
    keys, coordinator = toy.cache.keys(toy.requests["r70"], 70), toy.cache.coordinator
    limits = [
        (stop, limit) for stop in range(len(keys) + 1) for limit in (stop, stop - 1) if limit >= 0
    ]

    def found(cache: KVCacheCoordinator) -> list[tuple[int, int, tuple[int, ...]]]:
        matches = [cache.lookup(keys[:stop], limit) for stop, limit in limits]
        return [(match.hit, match.matched, match.reach) for match in matches]

    quick, ends = found(coordinator), coordinator.index.resume_points
    monkeypatch.setattr(PrefixIndex, "is_resume_point", lambda self, node: False)
    assert quick == found(coordinator) and ends > 2


@pytest.mark.parametrize("known", [0, 1, 17, 40])
def test_keys_made_in_blocks_are_the_sums_of_their_definition(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_BLOCK", 8)
    hasher, unit, root = PrefixHasher(unit=4, seed=5), 4, bytes(range(200, 216))
    tokens = np.random.default_rng(0).integers(0, 1 << 18, 41 * unit + 3).astype(np.int32)
    keys = hasher.extend(
        hasher.extend(NO_KEYS, tokens[: known * unit], root=root), tokens, root=root
    )
    factors = hasher._factors.reshape(2, -1).tolist()
    sums, expected = [int(word) for word in np.frombuffer(root, np.uint64)], []
    for place, token in enumerate(tokens[: 41 * unit].tolist()):
        sums = [
            (total + (token + 1) * lane[place]) % 2**64
            for total, lane in zip(sums, factors, strict=True)
        ]
        if place % unit == unit - 1:
            expected.append(sums)
    assert keys.view(np.uint64).reshape(-1, 2).tolist() == expected
