"""Wrong arguments are refused where they arrive, for their request alone: a table of wrong values
for every argument, and a bystander whose stream goes on through all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, ConfigError, SamplingParams
from octavo.engine.aio import AsyncLLM
from octavo.engine.live import Prompts
from tests import tiny
from tests.engine.test_aio import conserved, load
from tests.engine.test_text import BYTES

HALF = "\ud800"
NAN, INF = float("nan"), float("inf")
NO_WHOLE: tuple[Any, ...] = (1.5, "1", b"1", True, [1], {}, NAN, object(), np.float32(2))
NO_NUMBER: tuple[Any, ...] = ("1", b"1", None, True, [1], {}, NAN, object(), 1j)
HUGE = 10**400

PARAMS: dict[str, Sequence[Any]] = {
    "n": (*NO_WHOLE, None, 0, -1, HUGE),
    "temperature": (*NO_NUMBER, -0.1, INF, -INF, HUGE),
    "top_p": (*NO_NUMBER, -0.1, 1.1, INF),
    "top_k": (*NO_WHOLE, None, -2),
    "min_p": (*NO_NUMBER, -0.1, 1.1),
    "repetition_penalty": (*NO_NUMBER, 0, -1, INF),
    "presence_penalty": (*NO_NUMBER, -2.1, 2.1),
    "frequency_penalty": (*NO_NUMBER, -2.1, 2.1),
    "logit_bias": (
        5,
        "a",
        [(1, 2)],
        {"a": 1},
        {"": 1},
        {"-1": 1},
        {1.5: 1},
        {None: 1},
        {-1: 1},
        {HUGE: 1},
        {tiny.VOCAB: 1},
        {"9" * 30: 1},
        {1: "1"},
        {1: None},
        {1: NAN},
        {1: 101},
        {1: HUGE},
    ),
    "seed": tuple(value for value in NO_WHOLE),
    "max_tokens": (*NO_WHOLE, -1),
    "min_tokens": (*NO_WHOLE, None, -1, 17),
    "stop": (5, b"a", [b"a"], [5], [None], [""], "", HALF, ["a", HALF], {"a": 1}, object()),
    "stop_token_ids": (5, "5", ["5"], [1.5], [None], [-1], [tiny.VOCAB], [HUGE], {1: 2}, [True]),
    "ignore_eos": (None, 1, "true", [True]),
    "logprobs": (*NO_WHOLE, -1, 21, HUGE),
    "prompt_logprobs": (*NO_WHOLE, -1, 21, HUGE),
    "structured_outputs": ("json", {"json": {}}, True, 5),
}
OPTIONS: dict[str, Sequence[Any]] = {
    "prompt": (
        *(None, 5, 1.5, b"abc", object(), True, HALF, "a" + HALF, "", [], ()),
        *(["a"], [1.5], [None], [True], [-1], [tiny.VOCAB], [HUGE], [[1, 2]], {1: 2}, {}),
        *({"prompt_token_ids": None}, {"prompt_token_ids": "abc"}, {"prompt_token_ids": [b"a"]}),
        *(np.array([1.5]), np.array([[1, 2]]), np.array([]), torch.tensor([0.5]), torch.tensor(3)),
    ),
    "params": ({}, {"n": 1}, "greedy", 5, SamplingParams, [SamplingParams()]),
    "request_id": (5, b"id", HALF, "id" + HALF, "", "a#1", ["a"], object()),
    "priority": (*NO_WHOLE, None, HUGE, -HUGE),
    "cache_salt": (None, 5, b"salt", HALF, "salt" + HALF, ["salt"], object()),
    "marks": (None, 5, "5", ["a"], [None], [1.5], [-1], [HUGE], [True], {1: 2}, object()),
    "number": (*NO_WHOLE, None),
    "shown": (None, 5, "5", ["a"], [1.5], [-1], [tiny.VOCAB], [HUGE], [True], {1: 2}),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tiny.write("gemma3", tmp_path_factory.mktemp("arguments"))
    BYTES.backend.save_pretrained(directory)
    return load(directory)


def test_the_table_has_every_argument() -> None:
    assert {one.name for one in fields(SamplingParams)} == {*PARAMS}
    assert {*signature(Prompts.make).parameters} - {"self"} == {*OPTIONS}


def test_each_is_refused_for_its_request_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    (calm,) = llm.generate("bystander", params, progress=False)
    cases = [
        (name, value, {"sampling": {name: value}})
        for name, some in PARAMS.items()
        for value in some
    ]
    cases += [(name, value, {name: value}) for name, some in OPTIONS.items() for value in some]

    async def one(engine: AsyncLLM, options: dict[str, Any]) -> None:
        # As most callers do it: parameters are made where they are used.
        given = {"prompt": "a prompt of two units or so, and marks", **options}
        sampling, made = given.pop("sampling", None), given.pop("params", None)
        if sampling is not None:
            made = SamplingParams(**{"max_tokens": 16, **sampling})
        await engine.generate(given.pop("prompt"), made, **given)

    async def main() -> None:
        engine = AsyncLLM(llm)
        try:
            bystander = asyncio.create_task(engine.generate("bystander", params))
            for name, value, options in cases:
                try:
                    await one(engine, options)
                except ConfigError as error:
                    assert name.split("_")[0] in str(error), (name, value, str(error))
                else:
                    raise AssertionError(f"{name}={value!r} passes")
                assert engine.is_alive
            assert (await bystander).outputs == calm.outputs
            counters = await engine.counters()
            assert counters.recoveries == counters.crashed_steps == 0
            assert not engine._places and not engine._sessions
        finally:
            await engine.close(timeout=10)

    asyncio.run(main())
    conserved(llm)


@pytest.mark.parametrize(
    "made",
    [
        {"n": np.int64(2), "temperature": np.float32(0.5), "top_k": np.int32(3), "seed": HUGE},
        {"temperature": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "top_k": HUGE},
        {"stop": None, "stop_token_ids": None, "logit_bias": None, "max_tokens": HUGE},
        {"stop": ("a", "b"), "stop_token_ids": np.array([3, 4]), "logit_bias": {"5": 1}},
        {"seed": -1, "max_tokens": None, "logprobs": np.int8(2), "ignore_eos": np.True_},
    ],
)
def test_what_means_the_same_is_the_same(llm: LLM, made: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 3, **made})
    (output,) = llm.generate([np.array([5, 6, 7])], params, progress=False)
    assert output.error is None and output.prompt_token_ids == [5, 6, 7]
    assert all(type(getattr(params, name)) in (int, type(None)) for name in ("n", "top_k", "seed"))


@pytest.mark.parametrize("prompts", [None, 5, object(), b"text", [1, "a"], [None], [["a"]]])
def test_prompts_of_the_synchronous_api(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        llm.generate(prompts, progress=False)
    for params in ("a", 5, ["a"], [{}], SamplingParams):
        with pytest.raises(ConfigError, match="params"):
            llm.generate(["a"], params, progress=False)  # type: ignore[arg-type]
    conserved(llm)
