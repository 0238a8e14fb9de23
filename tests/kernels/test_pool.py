"""The kernels' threads: shared by callers, absent after a fork, as many as torch says."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.kernels.library import levels
from octavo.kernels.linear import linear

pytestmark = pytest.mark.skipif(not levels(), reason="no compiled kernels")

ROOT = Path(__file__).resolve().parents[2]


def test_many_callers_and_changing_numbers_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4000, 64, generator=generator)
    inputs = [torch.randn(3, 64, generator=generator) for _ in range(4)]
    before = torch.get_num_threads()

    def work(x: torch.Tensor) -> bool:
        wanted = x @ weight.T
        return all(torch.allclose(linear(x, weight), wanted, atol=1e-4) for _ in range(100))

    try:
        for threads in (4, 1, 2, 3):
            torch.set_num_threads(threads)
            with ThreadPoolExecutor(4) as callers:
                assert all(callers.map(work, inputs))
    finally:
        torch.set_num_threads(before)


def test_a_child_has_threads_of_its_own() -> None:
    code = "\n".join(
        (
            "import os, torch",
            "from octavo.kernels.linear import linear",
            "torch.set_num_threads(3)",
            "x, weight = torch.ones(1, 64), torch.ones(5000, 64)",
            "assert (linear(x, weight) == 64).all()",
            "child = os.fork()",
            "good = all((linear(x, weight) == 64).all() for _ in range(20))",
            "if child == 0: os._exit(0 if good else 1)",
            "assert good and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
