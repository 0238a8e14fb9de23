"""The arena's memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from octavo.runner.arena import memory

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [0, 1, 4097, 5 << 20])
def test_every_byte_can_be_written(size: int) -> None:
    made = memory(size)
    assert made.dtype == torch.uint8 and made.shape == (size,)
    made.fill_(7)
    assert bool((made == 7).all())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_childs_writes_stay_its_own() -> None:
    made = memory(1 << 20).zero_()
    if (child := os.fork()) == 0:
        made[0] = 77
        os._exit(0)
    os.waitpid(child, 0)
    assert made[0] == 0


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages"
)
def test_pages_may_be_huge() -> None:
    made = memory(8 << 20)
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line)
        if span:
            found = span[3] if int(span[1], 16) <= made.data_ptr() < int(span[2], 16) else None
        elif found and line.startswith("VmFlags"):
            # Private, and advised to be huge: shared memory would not become so.
            assert found.endswith("p") and " hg" in line
            return
    raise AssertionError("the arena is nowhere")
