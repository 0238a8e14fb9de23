"""The torch-free half imports where torch is absent. Each case runs in a fresh interpreter that
refuses heavy imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"

PRELUDE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        heavy = {"torch", "transformers", "safetensors", "gguf", "tokenizers", "huggingface_hub"}
        if top in heavy:
            raise ModuleNotFoundError(f"refused: {name}")
sys.meta_path.insert(0, Refuse())
"""


def torch_free_modules() -> list[str]:
    """Dotted names of every module that must import without torch."""
    parts = ("spec", "memory", "cache", "sched", "plan", "sim", "models")
    paths = [path for part in parts for path in sorted((PACKAGE / part).rglob("*.py"))]
    paths += [*sorted(PACKAGE.glob("kinds/*.py")), *sorted(PACKAGE.glob("kinds/*/spec.py"))]
    paths += [
        path for name in ("base", "events", "config") if (path := PACKAGE / f"{name}.py").exists()
    ]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    return ["octavo", *(name.removesuffix(".__init__") for name in names)]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torch_free_half_imports_without_torch() -> None:
    modules = torch_free_modules()
    assert {"octavo.base", "octavo.spec.law", "octavo.cache.layout", "octavo.sched.step"} <= set(
        modules
    )
    done = python(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_public_names_wait_until_touched() -> None:
    done = python(
        "from octavo import SamplingParams\nimport octavo\nassert 'LLM' in"
        " octavo.__all__\nSamplingParams(top_k=3)"
    )
    assert done.returncode == 0, done.stderr


def test_command_line_help_needs_no_torch() -> None:
    done = python("from octavo.cli.main import main\nmain(['generate', '--help'])")
    assert done.returncode == 0, done.stderr
    assert "--max-tokens" in done.stdout


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_refusal_works(name: str) -> None:
    done = python(f"import {name}")
    assert done.returncode != 0
    assert "refused" in done.stderr
