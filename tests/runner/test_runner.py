"""The runner against Transformers: tiny checkpoints, hand-made plans, any chunking, mixed batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.runner.runner import Runner
from octavo.runner.weights import safetensors_weights
from octavo.spec.hf import find_families, load_config, read_spec
from tests import tiny
from tests.runner.plans import Chunk, PlanMaker, hand_layout

FAMILIES = find_families()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def make_runner(name: str, root: Path, blocks: tuple[int, ...], dtype: str = "float32", num_pages: int = 256) -> Runner:
    path = tiny.write(name, root)
    spec = read_spec(load_config(path), families=FAMILIES)
    family, torch_dtype = FAMILIES.named(spec.family), getattr(torch, dtype)
    runner = Runner(
        spec=spec,
        family=family,
        layout=hand_layout(spec, blocks, dtype=dtype, num_pages=num_pages),
        weights=safetensors_weights(path, family, dtype=torch_dtype),
        dtype=torch_dtype,
    )
    # Bytes nobody has written are NaN in every float dtype: reading one shows.
    runner.arena.buffer.fill_(0xFF)
    return runner


def cuts(length: int, rng: np.random.Generator, most: int) -> list[int]:
    """Random chunk lengths that sum to ``length``."""
    parts: list[int] = []
    while sum(parts) < length:
        parts.append(min(int(rng.integers(1, most + 1)), length - sum(parts)))
    return parts


@pytest.mark.parametrize("name", tiny.SPECS)
@pytest.mark.parametrize(("blocks", "most"), [((16, 8), 100), ((4, 3), 23), ((5, 1), 7)])
def test_greedy_tokens_equal_transformers(name: str, blocks: tuple[int, ...], most: int, checkpoints: Path) -> None:
    runner = make_runner(name, checkpoints, blocks)
    ids, maker, rng = tiny.prompt(61), PlanMaker(runner.layout, 1, shuffle=most), np.random.default_rng(most)
    expected, gap = tiny.greedy(name, ids, 12)
    assert gap > 1e-4, "a tie: choose another prompt"
    done, result = 0, None
    for length in cuts(len(ids), rng, most):
        result = runner.execute(maker.plan([Chunk(0, ids[done : done + length], samples=done + length == len(ids))]))
        done += length
    assert result is not None
    made = [result.tokens["0"]]
    while len(made) < len(expected):
        made.append(runner.execute(maker.plan([Chunk(0, made[-1:])])).tokens["0"])
    assert made == expected


@pytest.mark.parametrize("name", tiny.SPECS)
def test_logits_of_a_mixed_batch_equal_transformers(name: str, checkpoints: Path) -> None:
    runner = make_runner(name, checkpoints, (8, 4))
    prompts = [tiny.prompt(length, seed=length) for length in (70, 33, 5, 48)]
    expected = [tiny.logits(name, ids) for ids in prompts]
    maker, rng = PlanMaker(runner.layout, len(prompts)), np.random.default_rng(5)
    while any(maker.computed[i] < len(ids) for i, ids in enumerate(prompts)):
        ready = [i for i, ids in enumerate(prompts) if maker.computed[i] < len(ids)]
        chunks = []
        for i in ready:
            length = 1 if rng.random() < 0.6 else int(rng.integers(1, 30))
            chunks.append(
                Chunk(i, prompts[i][maker.computed[i] : maker.computed[i] + length], samples=bool(rng.random() < 0.7))
            )
        logits = runner.logits(maker.plan(chunks))
        places = [(c.request, maker.computed[c.request] - 1) for c in chunks if c.samples]
        assert logits.shape == (len(places), tiny.VOCAB)
        for row, (request, place) in zip(logits, places, strict=True):
            torch.testing.assert_close(row, expected[request][place], atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_near_float32(checkpoints: Path) -> None:
    ids = tiny.prompt(40)
    runner = make_runner("gemma3", checkpoints, (16, 8), dtype="bfloat16")
    logits = runner.logits(PlanMaker(runner.layout, 1).plan([Chunk(0, ids)]))
    reference = tiny.logits("gemma3", ids)[-1]
    assert (logits[0] - reference).abs().max() < 0.15 * reference.std()
