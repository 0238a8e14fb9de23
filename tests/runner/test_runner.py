"""The runner against Transformers: tiny checkpoints, hand-made plans, any chunking, mixed
batches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.runner import logits as logits_module
from octavo.runner.runner import Runner
from octavo.runner.weights import safetensors_weights
from octavo.sched.sampling import SamplingParams
from octavo.spec.hf import find_families, load_config, read_spec
from tests import tiny
from tests.runner.plans import Chunk, PlanMaker, hand_layout

FAMILIES = find_families()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def make_runner(
    name: str, root: Path, blocks: tuple[int, ...], dtype: str = "float32", num_pages: int = 256
) -> Runner:
    path = tiny.write(name, root)
    spec = read_spec(load_config(path), families=FAMILIES)
    family, torch_dtype = FAMILIES.named(spec.family), getattr(torch, dtype)
    runner = Runner(
        spec=spec,
        family=family,
        layout=hand_layout(spec, blocks, dtype=dtype, num_pages=num_pages),
        weights=safetensors_weights(path, family),
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
def test_greedy_tokens_equal_transformers(
    name: str, blocks: tuple[int, ...], most: int, checkpoints: Path
) -> None:
    runner = make_runner(name, checkpoints, blocks)
    ids, maker, rng = (
        tiny.prompt(61),
        PlanMaker(runner.layout, 1, shuffle=most),
        np.random.default_rng(most),
    )
    done, result = 0, None
    for length in cuts(len(ids), rng, most):
        result = runner.execute(
            maker.plan([Chunk(0, ids[done : done + length], samples=done + length == len(ids))])
        )
        done += length
    assert result is not None
    made = [result.tokens["0"]]
    while len(made) < 12:
        made.append(runner.execute(maker.plan([Chunk(0, made[-1:])])).tokens["0"])
    assert tiny.check_greedy(name, ids, made) > tiny.TIE, "a tie: choose another prompt"


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
                Chunk(
                    i,
                    prompts[i][maker.computed[i] : maker.computed[i] + length],
                    samples=bool(rng.random() < 0.7),
                )
            )
        logits = runner.logits(maker.plan(chunks))
        places = [(c.request, maker.computed[c.request] - 1) for c in chunks if c.samples]
        assert logits.shape == (len(places), tiny.VOCAB)
        for row, (request, place) in zip(logits, places, strict=True):
            if not torch.allclose(row, expected[request][place], atol=1e-4, rtol=1e-4):
                # Random weights may amplify rounding: then float64 says who is right.
                exact = tiny.exact_logits(name, prompts[request])
                assert (row - exact[place]).abs().max() <= (expected[request] - exact).abs().max()


def test_bfloat16_stays_near_float32(checkpoints: Path) -> None:
    ids = tiny.prompt(40)
    runner = make_runner("gemma3", checkpoints, (16, 8), dtype="bfloat16")
    logits = runner.logits(PlanMaker(runner.layout, 1).plan([Chunk(0, ids)]))
    reference = tiny.logits("gemma3", ids)[-1]
    assert (logits[0] - reference).abs().max() < 0.15 * reference.std()


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_logits_tell_the_same_token(name: str, dtype: str, checkpoints: Path) -> None:
    runner = make_runner(name, checkpoints, (16, 8), dtype=dtype)
    hidden = torch.randn(
        9, runner.model.options.hidden_size, generator=torch.Generator().manual_seed(0)
    ).to(getattr(torch, dtype))
    wide, narrow = runner.model.head(hidden), runner.model.head(hidden, wide=False)
    assert wide.dtype == torch.float32 and torch.equal(wide, narrow.float())


# -- sampling --------------------------------------------------------------------------------------


def count_head(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the head from here on."""
    rows: list[int] = []
    head = runner.model.head

    def counted(hidden: torch.Tensor, **options: bool) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden, **options)

    monkeypatch.setattr(runner.model, "head", counted)
    return rows


@pytest.mark.parametrize("name", ["llama", "gemma3_scaled"])
@pytest.mark.parametrize("most", [7, 100])
@pytest.mark.parametrize("rows", [3, 1000])
def test_prompt_logprobs_are_those_of_transformers_whatever_the_chunks(
    name: str, most: int, rows: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(name, checkpoints, (8, 4))
    monkeypatch.setattr(logits_module, "SLICE_BYTES", 4 * tiny.VOCAB * rows)
    calls = count_head(runner, monkeypatch)
    prompts = [tiny.prompt(length, seed=length) for length in (45, 20)]
    params = SamplingParams(temperature=0, prompt_logprobs=5)
    maker, rng = PlanMaker(runner.layout, 3), np.random.default_rng(most)
    found: list[list] = [[], []]
    while any(done < len(ids) for done, ids in zip(maker.computed, prompts, strict=False)):
        chunks, scored = [Chunk(2, [7], samples=False)], {}
        for i, ids in enumerate(prompts):
            start, length = maker.computed[i], int(rng.integers(1, most + 1))
            if start < len(ids):
                scored[len(chunks)] = np.array(ids[start + 1 : start + 1 + length], np.int32)
                chunks.append(
                    Chunk(
                        i,
                        ids[start : start + length],
                        samples=start + length >= len(ids),
                        params=params,
                    )
                )
        result = runner.execute(replace(maker.plan(chunks), scored=scored))
        for i in range(2):
            found[i] += result.scored.get(str(i), [])
    assert max(calls) <= max(rows, 2)
    for ids, scores in zip(prompts, found, strict=True):
        expected = torch.log_softmax(tiny.logits(name, ids), dim=-1)[:-1]
        assert [one.token_id for one in scores] == ids[1:]
        own = expected.gather(1, torch.tensor(ids[1:])[:, None])
        torch.testing.assert_close(
            torch.tensor([one.logprob for one in scores]), own[:, 0], atol=2e-4, rtol=1e-4
        )
        assert [one.rank for one in scores] == ((expected > own).sum(1) + 1).tolist()
        best = expected.topk(5)
        assert [[token for token, _ in one.top] for one in scores] == best.indices.tolist()
        made = torch.tensor([[value for _, value in one.top] for one in scores])
        torch.testing.assert_close(made, best.values, atol=2e-4, rtol=1e-4)


def test_a_step_that_wants_no_logits_computes_none(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner("llama", checkpoints, (8,))
    calls, maker = count_head(runner, monkeypatch), PlanMaker(runner.layout, 2)
    assert runner.execute(maker.plan([Chunk(0, tiny.prompt(9), samples=False)])).tokens == {}
    assert calls == []
    runner.execute(maker.plan([Chunk(0, [5, 6]), Chunk(1, [8, 9, 10], samples=False)]))
    assert calls == [1]


def test_forks_choose_from_their_parents_logits(checkpoints: Path) -> None:
    runner = make_runner("llama", checkpoints, (8,))
    params = SamplingParams(seed=5, n=4, logprobs=2, temperature=3.0, presence_penalty=2.0)
    ids, maker = tiny.prompt(12), PlanMaker(runner.layout, 2)
    empty = np.zeros(0, np.int32)
    plan = maker.plan(
        [Chunk(1, [4, 5], params=SamplingParams(temperature=0)), Chunk(0, ids, params=params)]
    )
    plan = replace(plan, forks={1: ("x", "y", "z")}, history={1: (np.array(ids, np.int32), empty)})
    result = runner.execute(plan)
    assert (
        list(result.tokens) == ["1", "0", "x", "y", "z"] and len(set(result.tokens.values())) >= 4
    )
    assert list(result.logprobs) == ["0", "x", "y", "z"]
    expected = torch.log_softmax(tiny.logits("llama", ids)[-1], dim=-1)
    for name, one in result.logprobs.items():
        assert one.token_id == result.tokens[name]
        assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=2e-4), (
            "of the model, not of the temperature"
        )
        assert [token for token, _ in one.top] == expected.topk(2).indices.tolist()
    greedy = replace(params, temperature=0)
    again = replace(
        PlanMaker(runner.layout, 2).plan([Chunk(0, ids, params=greedy)]),
        forks={0: ("x",)},
        history={0: plan.history[1]},
    )
    assert set(runner.execute(again).tokens.values()) == {int(expected.argmax())}


def test_options_reach_the_rows_that_ask(checkpoints: Path) -> None:
    runner, ids, plain = (
        make_runner("llama", checkpoints, (8,)),
        tiny.prompt(12),
        SamplingParams(temperature=0),
    )
    best = tiny.logits("llama", ids)[-1].topk(3).indices.tolist()
    whole = np.array(ids, np.int32)
    repeated = np.array(best[:1], np.int32)
    biased, penalized = (
        replace(plain, logit_bias={77: 100.0}),
        replace(plain, logprobs=1, presence_penalty=2.0, frequency_penalty=2.0),
    )
    maker = PlanMaker(runner.layout, 5)
    waiting = Chunk(0, ids[:5], samples=False, params=penalized)
    chunks = [
        waiting,
        *(
            Chunk(i, ids, params=params)
            for i, params in enumerate((plain, biased, plain, penalized), 1)
        ),
    ]
    plan = replace(
        maker.plan(chunks),
        barred={3: (best[0], best[1])},
        history={4: (whole, repeated.repeat(40))},
    )
    result = runner.execute(plan)
    assert result.tokens == {"1": best[0], "2": 77, "3": best[2], "4": best[1]}
    assert (
        list(result.logprobs) == ["4"]
        and result.logprobs["4"].rank == 2
        and result.logprobs["4"].top[0][0] == best[0]
    )
