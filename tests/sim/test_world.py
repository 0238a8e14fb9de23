"""The simulation in CI: 200 seeds without a fault found, equal seeds equal to the byte, and every
kind of trouble really met.

Owns which seeds run. Planted bugs are in ``test_canaries.py``; thousands of seeds in
``benchmarks/sim_seeds.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from octavo.base import ConfigError, UnsupportedError
from octavo.memory.layout import ArenaLayout
from octavo.memory.pool import PagePool
from octavo.sim import world
from octavo.sim.model import toy_names

CHUNK = 25
SEEDS = 200


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds_are_clean(first: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        report = asdict(world.run(seed=seed))
        met.update({name: count for name, count in report.items() if isinstance(count, int)})
    assert met["finished"] > 100 and met["hits"] > 10 and met["entries_read"] > 10_000
    assert met["aborted"] and met["preemptions"] and met["evictions"] and met["lost_steps"]


def test_equal_seeds_give_equal_digests_and_others_do_not() -> None:
    digests = [world.run(seed=seed, steps=60).digest for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]


def test_the_outcome_does_not_depend_on_where_pages_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs are handed out from the other end of the arena: other addresses, the same outcome."""
    seeds = (3, 7, 12)
    before = [world.run(seed=seed, steps=60) for seed in seeds]
    make = PagePool.__init__

    def backwards(self: PagePool, layout: ArenaLayout) -> None:
        make(self, layout)
        self._free_slabs = self._free_slabs[::-1].copy()

    monkeypatch.setattr(PagePool, "__init__", backwards)
    after = [world.run(seed=seed, steps=60) for seed in seeds]
    assert [report.outcome for report in after] == [report.outcome for report in before]
    assert all(a.digest != b.digest for a, b in zip(after, before, strict=True))
    assert len({report.outcome for report in before}) == len(seeds)


@pytest.mark.parametrize("name", toy_names())
def test_every_toy_model_runs_by_name(name: str) -> None:
    assert world.run(seed=1, steps=40, config=name).model == name


def write_config(path: Path, **config: object) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def test_a_config_runs_with_its_own_layers_and_the_real_solver(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "config.json",
        model_type="gemma3_text",
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        hidden_size=128,
        sliding_window=40,
    )
    report = world.run(seed=2, steps=40, config=config)
    assert report.finished and report.entries_read


def test_a_model_that_cannot_be_simulated_is_refused_and_not_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no toy model"):
        world.run(seed=0, config="no-such-model")
    with pytest.raises(UnsupportedError, match="unheard_of"):
        world.run(seed=0, config=write_config(tmp_path / "config.json", model_type="unheard_of"))


def test_a_failure_prints_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: world.World, *facts: object) -> None:
        raise AssertionError("on purpose")

    monkeypatch.setattr(world.World, "_note", fail)
    with pytest.raises(
        world.SimulationError,
        match=r"AssertionError: on purpose\nreplay: octavo sim --seed 7 --steps 30 --model window$",
    ):
        world.run(seed=7, steps=30, config="window")
