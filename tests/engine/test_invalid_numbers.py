"""Weights that make NaN or infinity: the request fails and says why, nothing of it is cached, and
its neighbours get what they get without it.

The oracle is the same engine before its weights were spoiled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.aio import AsyncLLM, InvalidNumbersError
from tests import tiny
from tests.engine.test_aio import conserved

CURSED = 77
"""A token whose embedding is spoiled."""

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FINE = [[5, 6, 7, 8] * 12, [9, 10, 11], [12, 13] * 30]


@pytest.fixture(scope="module", params=["llama", "qwen3_window", "mamba2"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tiny.write(request.param, tmp_path_factory.mktemp("invalid"))
    return LLM(
        directory,
        dtype="float32",
        device="cpu",
        kv_memory="16MiB",
        max_model_len=256,
        max_num_batched_tokens=32,
        skip_tokenizer_init=True,
    )


@contextmanager
def spoiled(llm: LLM, name: str, place: Any, value: float) -> Iterator[None]:
    """One number of one weight is another while the block runs."""
    weight = dict(llm.core._runner.model.named_parameters())[name]
    with torch.inference_mode():
        before = weight[place].clone()
        weight[place] = value
    try:
        yield
    finally:
        with torch.inference_mode():
            weight[place] = before


def cached(llm: LLM) -> int:
    pool = llm.core.scheduler.cache.coordinator.pool
    return sum(
        pool.counts(bucket).cached for bucket in range(len(llm.built.layout.arena.page_units))
    )


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 40, 99], ids=["first", "inside", "last"])
def test_one_token_spoils_its_request_and_no_other(llm: LLM, value: float, at: int) -> None:
    """Prompts are computed in several steps; the token may be in one that samples nothing."""
    llm.core.scheduler.cache.clear_prefixes()
    calm = llm.generate(FINE, GREEDY, progress=False)
    llm.core.scheduler.cache.clear_prefixes()
    prompt = [20 + place % 5 for place in range(100)]
    prompt[at] = CURSED
    with spoiled(llm, "model.embed_tokens.weight", (CURSED, 3), value):
        several = SamplingParams(n=2, temperature=1, seed=1, max_tokens=8, logprobs=1)
        outputs = llm.generate(
            [FINE[0], prompt, FINE[1], prompt, FINE[2]],
            [GREEDY, GREEDY, GREEDY, several, GREEDY],
            progress=False,
        )
    assert [output.outputs for output in outputs[::2]] == [output.outputs for output in calm]
    for output in outputs[1::2]:
        assert output.error is not None and "NaN or infinity" in output.error
        assert [one.finish_reason for one in output.outputs] == ["error"] * len(output.outputs)
        assert not any(one.token_ids for one in output.outputs)
    conserved(llm)
    # Nothing of it is found by others.
    (again,) = llm.generate([prompt[:64]], GREEDY, progress=False)
    assert again.num_cached_tokens == 0


def test_a_request_ends_at_the_step_that_shows_it(llm: LLM) -> None:
    """Not at the one that samples: until then what is wrong would be cached and found by others."""
    prompt = [20 + place % 5 for place in range(100)]
    prompt[40] = CURSED
    llm.core.scheduler.cache.clear_prefixes()
    with spoiled(llm, "model.embed_tokens.weight", (CURSED, 3), float("nan")):
        (output,) = llm.generate([prompt], GREEDY, progress=False)
    assert output.error is not None and output.cache_report is not None
    assert output.cache_report.tokens == 32
    assert cached(llm) == 0


@pytest.mark.parametrize("name", ["head", "norm", "inner"])
def test_where_every_number_is_wrong_nobody_gets_a_token(llm: LLM, name: str) -> None:
    names = list(dict(llm.core._runner.model.named_parameters()))
    weight = {
        "head": "lm_head.weight",
        "norm": next(one for one in names if one.endswith("norm.weight")),
        "inner": next(one for one in names if "layers.1." in one and "proj" in one),
    }[name]
    llm.core.scheduler.cache.clear_prefixes()
    place = (0, 0) if name != "norm" else 0
    params = [
        GREEDY,
        SamplingParams(temperature=1, seed=1, logprobs=2, max_tokens=4),
        SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=4),
    ]
    with spoiled(llm, weight, place, float("inf")):
        outputs = llm.generate(FINE, params, progress=False)
    for output in outputs:
        assert output.error is not None and "NaN or infinity" in output.error
    assert cached(llm) == 0
    conserved(llm)
    healed = llm.generate(FINE, params, progress=False)
    assert all(output.error is None for output in healed)


def test_a_client_cannot_make_numbers_invalid(llm: LLM) -> None:
    """Bars and biases are of the request; where they leave nothing, that is no fault of a model."""
    params = SamplingParams(
        temperature=0,
        max_tokens=3,
        min_tokens=3,
        stop_token_ids=tuple(range(tiny.VOCAB)),
        logit_bias=dict.fromkeys(range(0, tiny.VOCAB, 2), -100.0),
        repetition_penalty=1e30,
    )
    (output,) = llm.generate([FINE[0]], params, progress=False)
    assert output.error is None and len(output.outputs[0].token_ids) == 3


def test_clients_and_metrics_are_told(llm: LLM) -> None:
    (calm,) = llm.generate([FINE[0]], GREEDY, progress=False)

    async def main() -> None:
        engine = AsyncLLM(llm)
        try:
            bystander = asyncio.create_task(engine.generate(FINE[0], GREEDY))
            with pytest.raises(InvalidNumbersError, match="NaN or infinity"):
                await engine.generate([CURSED, 1, 2], GREEDY)
            assert (await bystander).outputs == calm.outputs
            counters = await engine.counters()
            assert counters.invalid_numbers == 1
            assert counters.recoveries == counters.crashed_steps == 0
        finally:
            await engine.close(timeout=10)

    with spoiled(llm, "model.embed_tokens.weight", (CURSED, 0), float("nan")):
        asyncio.run(main())
    conserved(llm)
