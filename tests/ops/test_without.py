"""No implementation is missed: with any one of them left out, and with all, tokens are the same.

Each is replaced by plain PyTorch's, which counts its calls, so that a model is known to use it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.ops.backends import find_backends
from octavo.ops.table import Backend
from octavo.ops.torch.backend import BACKEND as PLAIN
from tests import tiny

USERS = MappingProxyType(
    {
        "attend": "gemma3",
        "gated": "llama",
        "norm_rotate": "gemma3",
        "attend_latent": "deepseek_v32",
        "score_and_choose": "deepseek_v32",
        "project_heads": "deepseek_v32",
        "attend_sparse": "deepseek_v4",
        "ssd_scan": "mamba2",
        "delta_scan": "qwen3_next",
        "decayed_scan": "minimax",
        "feature_scan": "linear_transformer",
    }
)
"""A family that uses an op; all others are used by ``llama``."""

OFFERED = sorted(
    {(b.name, op) for b in find_backends() for op in b.ops} - {(PLAIN.name, op) for op in PLAIN.ops}
)


def instead(ops: list[str], calls: Counter[str]) -> ModuleType:
    """A plugin whose backend does ``ops`` as plain PyTorch does, and counts."""

    def counted(op: str) -> Any:
        def run(*given: Any, **more: Any) -> Any:
            calls[op] += 1
            return PLAIN.ops[op](*given, **more)

        return run

    module = ModuleType("instead")
    backend = Backend(name="instead", takes=lambda place: True, ops={op: counted(op) for op in ops})
    module.BACKENDS = (backend,)  # type: ignore[attr-defined]
    return module


def check(name: str, path: Path, ops: list[str]) -> Counter[str]:
    """Greedy output with plain PyTorch's ``ops`` is Transformers'; how often each was called."""
    calls: Counter[str] = Counter()
    llm = LLM(
        tiny.write(name, path),
        dtype="float32",
        kv_memory="32MiB",
        max_model_len=512,
        max_num_batched_tokens=33,
        device="cpu",
        skip_tokenizer_init=True,
        plugins=[instead(ops, calls)],
    )
    prompts = [tiny.prompt(length, length) for length in (5, 40)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    gaps = [
        tiny.check_greedy(name, p, o.outputs[0].token_ids)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    assert max(gaps) > tiny.TIE, "ties say nothing; choose other prompts"
    return calls


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.parametrize(("backend", "op"), OFFERED)
def test_without_one(backend: str, op: str, path: Path) -> None:
    assert check(USERS.get(op, "llama"), path, [op])[op] > 0


@pytest.mark.parametrize("name", sorted({*USERS.values(), "gpt_oss", "kimi_linear"}))
def test_without_all(name: str, path: Path) -> None:
    check(name, path, list(PLAIN.ops))
