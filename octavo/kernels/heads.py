"""Products of a few rows with a matrix per head.

Owns the calls of csrc/heads.cpp. ``ops/oracles/products.py`` says what they compute.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from octavo.kernels.library import Library, library, type_number

MAX_ROWS: Final = 32
"""Rows beyond which torch's batched product is as fast."""

_LANES: Final = 16


class _Call(ctypes.Structure):
    """``struct ByHead``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *(
            (name, ctypes.c_int64)
            for name in ("count", "heads", "inner", "outer", "x_token", "x_head", "weight_head")
        ),
        ("type", ctypes.c_int32),
        ("flipped", ctypes.c_int32),
    )


def suits(weight: Tensor) -> bool:
    """Whether ``by_head`` computes with weight [H, ...] here: on a CPU, of sizes and a dtype that
    it knows.
    """
    return (
        weight.device.type == "cpu"
        and type_number(weight.dtype) is not None
        and all(size % _LANES == 0 for size in weight.shape[1:])
        and weight[0].is_contiguous()
        and library() is not None
    )


def by_head(
    x: Tensor, weight: Tensor, *, flipped: bool = False, kernels: Library | None = None
) -> Tensor:
    """x [n, H, inner] @ weight [H, inner, outer], or [H, outer, inner] where flipped, by head ->
    [n, H, outer] in x's dtype.
    """
    kernels, number = kernels or library(), type_number(x.dtype)
    assert kernels is not None and number is not None, "suits() says what with"
    count, heads, inner = x.shape
    outer = weight.shape[1 if flipped else 2]
    assert (
        weight.shape == (heads, *((outer, inner) if flipped else (inner, outer)))
        and weight[0].is_contiguous()
    )
    assert inner % _LANES == 0 and outer % _LANES == 0 and x.dtype == weight.dtype
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(count, heads, outer)
    call = _Call(
        *(one.data_ptr() for one in (x, weight, out)),
        *(count, heads, inner, outer, x.stride(0), x.stride(1), weight.stride(0)),
        *(number, int(flipped)),
    )
    kernels.function("by_head", ctypes.c_void_p, ctypes.c_int)(
        ctypes.addressof(call), torch.get_num_threads()
    )
    return out
