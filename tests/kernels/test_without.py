"""Compiled kernels change no token: greedy float32 output is the same with all of them switched
off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.kernels.library import levels, library
from tests import tiny

NAMES = (
    "llama",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "mamba2",
    "qwen3_next",
    "kimi_linear",
)
"""One family at least for every kernel that a layer calls."""


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCTAVO_KERNELS", "0")
    library.cache_clear()
    yield
    monkeypatch.undo()
    library.cache_clear()


@pytest.mark.skipif(not levels(), reason="no compiled kernels")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_torch_alone_are_those_of_transformers(
    name: str, tmp_path: Path, torch_only: None
) -> None:
    """What tests/engine/test_equivalence.py shows with kernels."""
    assert library() is None
    llm = LLM(
        tiny.write(name, tmp_path),
        dtype="float32",
        kv_memory="32MiB",
        max_model_len=512,
        max_num_batched_tokens=33,
        device="cpu",
        skip_tokenizer_init=True,
    )
    prompts = [tiny.prompt(length, length) for length in (5, 40, 100)]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), progress=False
    )
    gaps = [
        tiny.check_greedy(name, p, o.outputs[0].token_ids)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    assert sum(gap > tiny.TIE for gap in gaps) >= 2, "ties say nothing; choose other prompts"
