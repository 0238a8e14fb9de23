"""A backend from outside, for one op: bound by models that run where it does, and by no others.

Owns the proof for the sample ``fused_norm``: it equals the op's oracle, a model computes with it
and generates what it did, and it is found as an installed package is.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.base import ConfigError
from octavo.ops import backends
from octavo.ops.backends import find_backends, ops_for
from octavo.ops.oracles import pointwise as oracles
from octavo.ops.table import Backend
from tests import tiny
from tests.ops.cases import Numbers, norm
from tests.plugins import fused_norm

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_equals_the_oracle(dtype: torch.dtype) -> None:
    for case in norm(Numbers(0, dtype)):
        made = fused_norm.norm(*case.given)
        torch.testing.assert_close(
            made.double(), oracles.norm(*case.given), atol=2e-5, rtol=2e-5, check_dtype=False
        )


def test_a_model_computes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(*given: Any) -> torch.Tensor:
        calls["norm"] += 1
        return fused_norm.norm(*given)

    backend = Backend(name="fused", takes=fused_norm.takes, ops={"norm": counted})
    monkeypatch.setattr(fused_norm, "BACKENDS", (backend,))
    llm = LLM(
        tiny.write("llama", tmp_path),
        dtype="float32",
        kv_memory="16MiB",
        device="cpu",
        skip_tokenizer_init=True,
        plugins=["tests.plugins.fused_norm"],
    )
    prompt = tiny.prompt(40, 3)
    (output,) = llm.generate([prompt], GREEDY, progress=False)
    assert tiny.check_greedy("llama", prompt, output.outputs[0].token_ids) > tiny.TIE
    assert llm.core._runner.ops.chosen["norm"] == "fused"
    assert "fused" not in {name for op, name in llm.core._runner.ops.chosen.items() if op != "norm"}
    # Two norms in each of four layers, and one ahead of the head, in every step.
    assert calls["norm"] == 9 * 12


def test_it_is_bound_where_it_runs_only() -> None:
    found = find_backends([fused_norm])
    assert ops_for(CPU, torch.float32, backends=found).chosen["norm"] == "fused"
    assert ops_for(CPU, torch.bfloat16, backends=found).chosen["norm"] != "fused"
    assert ops_for(CPU, torch.float32).chosen["norm"] != "fused"
    chosen = {"OCTAVO_OPS": "norm=torch"}
    assert ops_for(CPU, torch.float32, backends=found, environment=chosen).chosen["norm"] == "torch"


def test_an_installed_package_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def installed(group: str) -> list[SimpleNamespace]:
        asked.append(group)
        return [SimpleNamespace(load=lambda: fused_norm.BACKEND)]

    monkeypatch.setattr(backends, "entry_points", installed)
    assert find_backends()[-1] is fused_norm.BACKEND
    assert asked == ["octavo.backends"]


def test_a_module_may_name_its_backends_by_path() -> None:
    module = ModuleType("lazy")
    module.BACKENDS = ("tests.plugins.fused_norm:BACKEND",)  # type: ignore[attr-defined]
    assert find_backends([module])[-1] is fused_norm.BACKEND


def test_what_is_no_backend_is_refused() -> None:
    module = ModuleType("wrong")
    module.BACKENDS = (7,)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="7 is offered as a backend and is none"):
        find_backends([module])


def test_the_walk_through_shows_the_real_file() -> None:
    """Every Python block of the document stands in the sample."""
    text = (ROOT / "docs/adding-a-backend.md").read_text(encoding="utf-8")
    sample = (ROOT / "tests/plugins/fused_norm.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        assert block in sample, f"fused_norm.py does not contain:\n{block}"
