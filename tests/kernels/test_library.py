"""The library of compiled kernels: there where a compiler is, chosen by the environment, absent
without a word too many.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.base import ConfigError
from octavo.kernels.library import EMULATED, ISAS, levels, library

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_library_is_there_where_a_compiler_is() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    assert levels()[0] == "portable"


@pytest.mark.skipif(not levels(), reason="no compiled kernels")
def test_the_environment_chooses() -> None:
    name = "from octavo.kernels.library import library; print(getattr(library(), 'isa', None))"
    best = [isa for isa in levels() if isa != EMULATED][-1]
    assert python(name, OCTAVO_CPU_ISA="", OCTAVO_KERNELS="1").stdout.strip() == best
    assert python(name, OCTAVO_CPU_ISA="portable", OCTAVO_KERNELS="1").stdout.strip() == "portable"
    assert python(name, OCTAVO_KERNELS="0").stdout.strip() == "None"


@pytest.mark.skipif(not levels(), reason="no compiled kernels")
def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    absent = next((isa for isa in ISAS if isa not in levels()), "avx9000")
    with pytest.raises(ConfigError, match=absent):
        library(absent)


def test_without_the_library_torch_runs_and_it_is_said_once() -> None:
    code = "\n".join(
        (
            "from pathlib import Path",
            "from octavo.kernels import library",
            "library.PATH = Path('nowhere.so')",
            "assert not library.available() and not library.available()",
        )
    )
    done = python(code, OCTAVO_KERNELS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nowhere.so") == 1
    assert "torch runs instead" in done.stderr


@pytest.mark.skipif(not levels(), reason="no compiled kernels")
def test_a_library_of_other_sources_is_not_called(tmp_path: Path) -> None:
    (tmp_path / "other.cpp").write_text("int main() {}")
    code = "\n".join(
        (
            "from pathlib import Path",
            "from octavo.kernels import library",
            f"library.SOURCES = Path({str(tmp_path)!r})",
            "assert not library.available()",
        )
    )
    done = python(code, OCTAVO_KERNELS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("other sources") == 1
