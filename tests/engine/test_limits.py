"""How long an answer may be: by the request, the model and an otherwise empty arena, and never by
what others hold. And limits of nothing.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, CapacityError, SamplingParams
from octavo.cache.layout import lone_pages, longest_request, slabs_needed
from tests import tiny
from tests.engine.test_text import BYTES
from tests.faults.toy import full, layout_of, state, window

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": "768KiB"}
ON: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write("llama", tmp_path_factory.mktemp("limits"))
    BYTES.backend.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, **OPTIONS)


@pytest.mark.parametrize("slabs", [2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("groups", [(full(),), (full(), window(8)), (window(8), state(256))])
def test_the_longest_request_is_what_a_search_finds(groups: Any, slabs: int) -> None:
    layout = layout_of(*groups, slabs=slabs)
    most = layout.max_model_len
    fits = [n for n in range(1, most + 1) if slabs_needed(layout, lone_pages(layout, n)) <= slabs]
    assert longest_request(layout, most) == max(fits, default=0) == len(fits)
    assert longest_request(layout, 7) == min(7, len(fits))


@pytest.mark.parametrize("limit", [None, 3000, 2**31 - 1])
def test_an_answer_may_have_what_fits(llm: LLM, limit: int | None) -> None:
    longest = llm.built.max_model_len
    assert 100 < longest < llm.built.spec.max_model_len == 4096
    (output,) = llm.generate("hello", SamplingParams(max_tokens=limit, **ON), progress=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == longest - len("hello")


def test_what_fits_does_not_depend_on_others(llm: LLM) -> None:
    prompts = ["hello", *("x" * length for length in (1, 50, 90))]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=None, **ON), progress=False)
    assert llm.core.scheduler.num_preemptions, "all at once are more than the arena has"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == llm.built.max_model_len - len(prompt)


def test_a_prompt_that_fills_everything_is_refused_with_the_number_that_fits(llm: LLM) -> None:
    longest = llm.built.max_model_len
    for limit in (1, None, 5000):
        with pytest.raises(CapacityError, match=rf"enough for {longest:,} tokens; raise kv_memory"):
            llm.generate("x" * longest, SamplingParams(max_tokens=limit), progress=False)
    (output,) = llm.generate("x" * (longest - 1), SamplingParams(max_tokens=9, **ON))
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(CapacityError, match=r"max_model_len 4,096; at most .* of prompt fit"):
        llm.generate("x" * 5000, SamplingParams(), progress=False)


def test_min_tokens_beyond_what_fits_is_refused(llm: LLM) -> None:
    longest = llm.built.max_model_len
    params = SamplingParams(max_tokens=None, min_tokens=longest)
    with pytest.raises(CapacityError, match=rf"^min_tokens .* leaves room for {longest - 5:,}"):
        llm.generate("hello", params, progress=False)


# -- nothing ---------------------------------------------------------------------------------------


def test_a_limit_of_nothing_computes_the_prompt_alone(llm: LLM) -> None:
    prompts = ["hello there", "x"]
    nothing, one = (
        llm.generate(
            prompts, SamplingParams(max_tokens=limit, prompt_logprobs=3, **ON), progress=False
        )
        for limit in (0, 1)
    )
    for empty, other in zip(nothing, one, strict=True):
        (made,) = empty.outputs
        assert (made.token_ids, made.text, made.finish_reason) == ([], "", "length")
        assert empty.prompt_logprobs == other.prompt_logprobs
        assert len(empty.prompt_token_ids) == len(empty.prompt_logprobs or ())
        assert empty.cache_report is not None
        assert empty.cache_report.tokens == len(empty.prompt_token_ids)
    llm.core.scheduler.check()


def test_a_limit_of_nothing_leaves_the_whole_room_to_the_prompt(llm: LLM) -> None:
    longest = llm.built.max_model_len
    (output,) = llm.generate("x" * longest, SamplingParams(max_tokens=0), progress=False)
    assert output.finished and output.outputs[0].token_ids == []
    with pytest.raises(CapacityError):
        llm.generate("x" * (longest + 1), SamplingParams(max_tokens=0), progress=False)


def test_several_of_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, n=3, logprobs=2)
    (output,) = llm.generate("hello", params, progress=False)
    assert [(made.token_ids, made.logprobs) for made in output.outputs] == [([], [])] * 3


# -- seeds -----------------------------------------------------------------------------------------


def draws(llm: LLM, prompts: Any, **params: Any) -> list[list[int]]:
    asked = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.5, **params)
    outputs = llm.generate(prompts, asked, progress=False)
    return [made.token_ids for output in outputs for made in output.outputs]


def test_without_a_seed_runs_differ_and_with_one_they_are_equal(model: Path) -> None:
    free, other, seeded, again = (LLM(model, seed=seed, **OPTIONS) for seed in (None, None, 7, 7))
    assert draws(free, "Once") != draws(free, "Once")
    assert draws(free, "Once") != draws(other, "Once")
    first = draws(seeded, "Once")
    assert first == draws(seeded, "Once") == draws(again, "Once")
    assert first == draws(free, "Once", seed=7), "the engine's seed is that of the request"
    assert first != draws(seeded, "Once", seed=8)
    assert draws(free, "Once", seed=-1) != draws(free, "Once", seed=-1)


def test_a_call_can_be_repeated_and_its_prompts_and_branches_differ(model: Path) -> None:
    llm = LLM(model, seed=7, **OPTIONS)
    many = draws(llm, ["Once"] * 3, n=2)
    assert many == draws(llm, ["Once"] * 3, n=2)
    assert len(set(map(tuple, many))) == 6
    assert many[0] == draws(llm, "Once")[0]
    lone = [draws(llm, [f"p{number}"], seed=number) for number in Random(3).sample(range(99), 3)]
    assert len({tuple(tokens) for (tokens,) in lone}) == 3
