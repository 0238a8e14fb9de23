"""Caches in another dtype than the model: which are possible, and that cutting the work changes
nothing in any.

A number as near to the border between two codes as products of matrices of different shapes differ
is a tie, too, which a later
choice of tokens may enlarge: prompts are such that none decides. Owns no quality:
``benchmarks/cache_quality.py`` measures what quantised caches cost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.base import UnsupportedError
from tests import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LENGTHS = (5, 40, 90)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def engine(root: Path, name: str, **options: object) -> LLM:
    given: dict[str, object] = {
        "kv_memory": "32MiB",
        "max_model_len": 512,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    return LLM(tiny.write(name, root), dtype="float32", **{**given, **options})  # type: ignore[arg-type]


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


LONGER = (5, 129, 270)
"""Beyond the hash unit of models whose compressors open groups of 128 tokens."""

CASES = [
    ("llama", "bf16", "auto"),
    ("gemma3", "bf16", "auto"),
    ("gemma3", "fp16", "auto"),
    ("deepseek_v3", "fp8", "auto"),
    ("deepseek_v32", "fp8", "auto"),
    ("deepseek_v32", "fp32", "fp4"),
    ("glm_moe_dsa", "fp8", "fp4"),
    ("deepseek_v4", "fp8", "fp4"),
    ("deepseek_v4_r128", "fp8", "fp8"),
]


@pytest.mark.parametrize(("name", "kv", "index"), CASES)
def test_cutting_the_work_changes_nothing(root: Path, name: str, kv: str, index: str) -> None:
    prompts = [
        tiny.prompt(length, length) for length in (LONGER if name.endswith("r128") else LENGTHS)
    ]
    options = {"kv_cache_dtype": kv, "indexer_cache_dtype": index}
    whole = engine(root, name, enable_prefix_caching=False, **options)
    expected = [tokens(whole, [prompt])[0] for prompt in prompts]
    for budget in (1, 7, 33):
        llm = engine(root, name, max_num_batched_tokens=budget, **options)
        assert tokens(llm, prompts) == expected
        warm = llm.generate(prompts, GREEDY, progress=False)
        assert [output.outputs[0].token_ids for output in warm] == expected
        unit = llm.built.layout.hash_unit
        assert [output.num_cached_tokens for output in warm] == [
            (len(prompt) - 1) // unit * unit for prompt in prompts
        ]


def test_a_cache_takes_the_bytes_of_its_dtype(root: Path) -> None:
    size = {
        kv: sum(
            group.group.bytes_needed(100)
            for group in engine(root, "llama", kv_cache_dtype=kv).built.layout.groups
        )
        for kv in ("auto", "fp32", "bf16")
    }
    assert size["auto"] == size["fp32"] == 2 * size["bf16"]


def test_keys_and_values_per_head_have_no_scales(root: Path) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"kv_cache_dtype fp8, .* layer 0 \(full\): k in float8_e4m3fn would need a scale",
    ):
        engine(root, "llama", kv_cache_dtype="fp8")


def test_keys_that_cannot_be_rotated_are_named(root: Path) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"indexer_cache_dtype fp4: layer 0 \(dsa\): index keys of 24 elements, not a power",
    ):
        engine(root, "deepseek_v32_narrow", indexer_cache_dtype="fp4")


def test_index_keys_that_are_not_there_have_no_dtype(root: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="indexer_cache_dtype fp4: the model keeps no index keys"
    ):
        engine(root, "llama", indexer_cache_dtype="fp4")
