"""Entries without heads as caches keep them, for kernels that read them from pages.

Owns ``Part`` and ``Paged``, and their form in C (csrc/entries.h). Knows element formats as dtypes;
knows no stream and no kind.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

FORMATS: Final = MappingProxyType(
    {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float4_e2m1fn_x2: 3}
)
"""Dtypes that entries may have, and their numbers in C."""

_EXPONENT = torch.float8_e8m0fnu
_WHOLE = 1 << 62


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some elements of an entry: one field over the arena.

    data: [starts, 1, entries, elements], pages are its first index; fp4 has two in a byte, the
        earlier in its low half.
    scale: [starts, 1, entries, blocks] float32 or 8-bit exponents, one for each ``block`` elements;
        None: elements as they are.
    """

    data: Tensor
    scale: Tensor | None = None
    block: int | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return self.data.shape[3] * (2 if self.data.dtype == torch.float4_e2m1fn_x2 else 1)


class _Part(ctypes.Structure):
    """``struct Part``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("page", "entry", "scale_page", "scale_entry", "size", "block")
        ),
        ("type", ctypes.c_int32),
        ("scale_exponent", ctypes.c_int32),
    )


class PagedStruct(ctypes.Structure):
    """``struct Paged``."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("table_row", "per_block", "count")),
        ("parts", _Part * 2),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Paged:
    """Entries of requests under a law that lets nothing go; an entry's parts lie one behind the
    other.

    table: int32 [rows, N], pages by block. per_block: entries of a block.
    """

    table: Tensor
    per_block: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Elements of an entry."""
        return sum(part.size for part in self.parts)

    @cached_property
    def struct(self) -> PagedStruct:
        """``struct Paged``, valid as long as this."""
        assert self.table.dtype == torch.int32 and self.table.stride(1) == 1, (
            "a table has int32 rows"
        )
        assert 1 <= len(self.parts) <= 2 and all(
            part.data.shape[2] == self.per_block for part in self.parts
        )
        parts = (_Part * 2)(*(_struct(part) for part in self.parts))
        return PagedStruct(
            self.table.data_ptr(), self.table.stride(0), self.per_block, len(self.parts), parts
        )


def _struct(part: Part) -> _Part:
    data, scale, block = part.data, part.scale, part.block
    assert data.stride(3) == 1 and data.shape[1] == 1, "entries have no head axis"
    page, entry = (data.stride(axis) * data.element_size() for axis in (0, 2))
    address, exponent, scale_page, scale_entry = None, False, 0, 0
    if scale is not None:
        assert (
            block is not None
            and block % 32 == 0
            and scale.shape[3] * block >= part.size
            and scale.stride(3) == 1
        )
        assert scale.dtype in (torch.float32, _EXPONENT), "scales are float32 or exponents"
        address, exponent = scale.data_ptr(), scale.dtype == _EXPONENT
        scale_page, scale_entry = (scale.stride(axis) * scale.element_size() for axis in (0, 2))
    return _Part(
        *(data.data_ptr(), address, page, entry, scale_page, scale_entry),
        *(part.size, block or _WHOLE, FORMATS[data.dtype], int(exponent)),
    )
