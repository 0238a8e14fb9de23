"""The arena as tensors: one buffer, and views of every field over it.

Owns the bytes and the copy jobs. Knows page formats; knows no requests, laws or kinds.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from math import prod

import torch

from octavo.cache.layout import CacheLayout
from octavo.ops.paged import FieldView
from octavo.sched.step import CopyJob
from octavo.spec.group import FieldSlot
from octavo.spec.stream import DTYPE_BYTES


def memory(total_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """uint8 [total_bytes], uninitialised; on a CPU in huge pages, where the system has them for
    those who ask.

    Attention reads pages from all over an arena, and the processor's own table of memory pages
    (TLB) is small.
    """
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or total_bytes == 0:
        return torch.empty(total_bytes, dtype=torch.uint8, device=device)
    # Private: shared memory gets no huge pages, and a child of fork would write into its parent's
    # cache.
    mapped = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without them says so; the memory is there all the same.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class Arena:
    """One buffer of ``layout.arena.total_bytes`` on a device, uninitialised. It outlives models;
    views are cut on demand.
    """

    def __init__(self, layout: CacheLayout, device: torch.device | str = "cpu") -> None:
        self.layout = layout.arena
        self.buffer = memory(layout.arena.total_bytes, device)

    def view(self, slot: FieldSlot) -> FieldView:
        """The slot's field in every page: strides run from one unit to the next, so any unit may
        begin a page.
        """
        size, unit = DTYPE_BYTES[slot.field.dtype], self.layout.unit_bytes
        assert unit % size == 0 and slot.offset % size == 0, (
            "units and fields are aligned to their elements"
        )
        heads, *rest = slot.field.shape if slot.field.shard == "heads" else (1, *slot.field.shape)
        entry = prod(rest)
        strides, step = [], entry
        for width in rest:
            step //= width
            strides.append(step)
        spans = slot.offset + slot.entries * slot.field.entry_bytes
        starts = (self.layout.total_bytes - spans) // unit + 1
        typed = self.buffer.view(getattr(torch, slot.field.dtype))
        data = typed.as_strided(
            (starts, heads, slot.entries, *rest),
            (unit // size, slot.entries * entry, entry, *strides),
            slot.offset // size,
        )
        return FieldView(data, headed=slot.field.shard == "heads")

    def copy(self, jobs: Iterable[CopyJob]) -> None:
        """Run copy jobs in order."""
        unit = self.layout.unit_bytes
        for job in jobs:
            source = self.buffer[job.source * unit : (job.source + job.units) * unit]
            target = self.buffer[job.target * unit : (job.target + job.units) * unit]
            # Compaction may shift a page by less than its own length.
            overlap = abs(job.source - job.target) < job.units
            target.copy_(source.clone() if overlap else source)
