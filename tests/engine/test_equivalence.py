"""Greedy float32 output of the whole engine equals Transformers on tiny checkpoints, however the
work is cut.

Owns the matrix: plain, chunked, batched, prefix hit, preempted; whole for some families, in one
scenario for all others. A tie (top-2 gap of the oracle below 1e-4) would make a comparison
meaningless, so prompts are chosen to have none and the test says so.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.base import CapacityError
from tests import tiny, tiny_compressed, tiny_delta, tiny_latent, tiny_ssm

THOROUGH = ("llama", "qwen3", "gemma3")
"""Families that go through every case by itself; all others go through ``test_all_ways``."""

OTHERS = (
    "gemma2",
    "qwen2",
    "mistral",
    "ministral",
    "olmo2",
    "olmo3",
    "exaone4",
    "exaone4_full",
    "smollm3",
    "smollm3_full",
    "cohere2",
    "glm4",
    "phi3",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "gemma4_values",
    "qwen3_moe",
    "qwen3_moe_window",
    "glm4_moe",
    "glm4_moe_plain",
    "gpt_oss",
    "llama4",
    "llama4_plain",
    *tiny_latent.SPECS,
    *tiny_compressed.SPECS,
    *tiny_ssm.SPECS,
    *tiny_delta.SPECS,
)
LENGTHS = (1, 5, 17, 40, 63, 100)
COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


Cases = tuple[tuple[list[int], list[int]], ...]
"""Prompts and their greedy continuations."""


@cache
def oracle(name: str) -> Cases:
    """(prompt, greedy continuation) by Transformers, one prompt per length, none of them with a
    tie.
    """
    found = []
    for length in LENGTHS:
        for seed in range(100 * length, 100 * length + 13):
            prompt = tiny.prompt(length, seed)
            expected, gap = tiny.greedy(name, prompt, COUNT)
            if gap > tiny.TIE:
                found.append((prompt, expected))
                break
    assert len(found) == len(LENGTHS), "every length has a prompt without a tie"
    return tuple(found)


def engine(root: Path, name: str, **options: object) -> LLM:
    given: dict[str, object] = {
        "kv_memory": "32MiB",
        "max_model_len": 512,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    return LLM(tiny.write(name, root), dtype="float32", **{**given, **options})  # type: ignore[arg-type]


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    outputs = llm.generate(prompts, GREEDY, progress=False)
    assert all(
        output.finished and output.outputs[0].finish_reason == "length" for output in outputs
    )
    return outputs


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", THOROUGH)
def test_plain(root: Path, name: str) -> None:
    llm = engine(root, name, enable_prefix_caching=False)
    for prompt, expected in oracle(name):
        assert ids(generate(llm, [prompt])) == [expected]


@pytest.mark.parametrize("name", THOROUGH)
@pytest.mark.parametrize("budget", [1, 3, 7, 16, 33])
def test_chunked_and_batched(root: Path, name: str, budget: int) -> None:
    cases = oracle(name)
    llm = engine(root, name, max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert ids(generate(llm, [prompt for prompt, _ in cases])) == [
        expected for _, expected in cases
    ]


@pytest.mark.parametrize("name", THOROUGH)
@pytest.mark.parametrize("budget", [19, 2048])
def test_prefix_hits(root: Path, name: str, budget: int) -> None:
    cases = oracle(name)
    llm = engine(root, name, max_num_batched_tokens=budget)
    prompts = [prompt for prompt, _ in cases]
    cold, warm = generate(llm, prompts), generate(llm, prompts)
    assert ids(cold) == ids(warm) == [expected for _, expected in cases]
    assert [output.num_cached_tokens for output in cold] == [0] * len(cases)
    assert [output.num_cached_tokens for output in warm] == [
        (length - 1) // 16 * 16 for length in LENGTHS
    ]


@pytest.mark.parametrize("name", THOROUGH)
def test_a_conversation_goes_on_from_its_own_output(root: Path, name: str) -> None:
    llm = engine(root, name)
    prompt, expected = oracle(name)[-1]
    generate(llm, [prompt])
    longer = prompt + expected + tiny.prompt(9, 3)
    (output,) = generate(llm, [longer])
    assert output.num_cached_tokens >= len(prompt) - 16
    assert ids([output]) == [tiny.greedy(name, longer, COUNT)[0]]


@pytest.mark.parametrize("name", THOROUGH)
@pytest.mark.parametrize("caching", [True, False])
def test_preempted(root: Path, name: str, caching: bool) -> None:
    cases = oracle(name)
    llm = engine(
        root, name, kv_memory=tight(root, name), max_model_len=128, enable_prefix_caching=caching
    )
    outputs = generate(llm, [prompt for prompt, _ in cases])
    assert ids(outputs) == [expected for _, expected in cases]
    assert llm.core.scheduler.num_preemptions > 0


def tight(root: Path, name: str) -> int:
    """Memory that the longest request needs alone, and half as much again."""
    report = generate(engine(root, name), [oracle(name)[-1][0]])[0].cache_report
    return int(report.peak_bytes * 1.5)


@pytest.mark.parametrize("name", THOROUGH)
def test_stops_and_reports(root: Path, name: str) -> None:
    prompt, expected = oracle(name)[2]
    llm = engine(root, name)
    stop = expected[4]
    (output,) = llm.generate(
        [prompt],
        SamplingParams(temperature=0, max_tokens=COUNT, stop_token_ids=[stop]),
        progress=False,
    )
    assert output.outputs[0].token_ids == expected[: expected.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"


def alone(name: str, llm: LLM) -> tuple[Cases, int]:
    """(Cases that ``llm`` computes one by one and Transformers agrees with, none of them with a
    tie; most bytes held).
    """
    found, held = [], 0
    for length in LENGTHS:
        for seed in range(100 * length, 100 * length + 13):
            prompt = tiny.prompt(length, seed)
            (output,) = generate(llm, [prompt])
            if tiny.check_greedy(name, prompt, output.outputs[0].token_ids) > tiny.TIE:
                found.append((prompt, output.outputs[0].token_ids))
                held = max(held, output.cache_report.peak_bytes)
                break
    assert len(found) == len(LENGTHS), "every length has a prompt without a tie"
    return tuple(found), held


@pytest.mark.parametrize("name", OTHERS)
def test_all_ways(root: Path, name: str) -> None:
    """Alone and whole; token by token; batched and chunked; the same from cached prefixes;
    preempted, with and without them.
    """
    cases, held = alone(name, engine(root, name, enable_prefix_caching=False))
    prompts, expected = [prompt for prompt, _ in cases], [tokens for _, tokens in cases]
    single = engine(root, name, max_num_batched_tokens=1, enable_prefix_caching=False)
    assert ids(generate(single, prompts[1:3])) == expected[1:3]
    mixed = engine(root, name, max_num_batched_tokens=7)
    assert ids(generate(mixed, prompts)) == expected
    warm = generate(mixed, prompts)
    assert ids(warm) == expected
    unit = mixed.core.scheduler.cache.layout.hash_unit
    assert [output.num_cached_tokens for output in warm] == [
        (length - 1) // unit * unit for length in LENGTHS
    ]
    # Where nothing grows, what is admitted is never in the way; tests/faults/test_states.py takes
    # pages from such requests.
    if any(group.fixed is None for group in mixed.core.scheduler.cache.layout.groups):
        for caching in (True, False):
            assert any(
                preemptions(root, name, cases, int(held * share), caching)
                for share in (1.5, 1.75, 2, 2.5, 3)
            )


def preemptions(root: Path, name: str, cases: Cases, memory: int, caching: bool) -> int:
    """How often a request gave way in ``memory``; the output is right however often that is.

    0 also where that is too little for any: besides what it holds, a request is charged for a copy
    of a shared block.
    """
    try:
        llm = engine(
            root,
            name,
            kv_memory=memory,
            max_model_len=128,
            enable_prefix_caching=caching,
            max_num_batched_tokens=33,
        )
    except CapacityError:
        return 0
    if llm.built.max_model_len < max(len(prompt) + len(tokens) for prompt, tokens in cases):
        return 0
    outputs = generate(llm, [prompt for prompt, _ in cases])
    assert ids(outputs) == [tokens for _, tokens in cases]
    return llm.core.scheduler.num_preemptions
