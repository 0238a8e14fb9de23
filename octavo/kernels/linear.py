"""Products of rows with a weight matrix: few at the speed at which memory gives the weights, many where torch is slower.

Owns the calls of csrc/linear.cpp. ``reference.py`` says what they compute.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from octavo.kernels.library import Library, library, type_number

MAX_ROWS = 32
"""Rows beyond which torch's matrix product is as fast, except for bfloat16 without instructions of its own (``EMULATING``)."""

EMULATING: Final = ("avx2", "avx512")
"""Instruction sets on which torch multiplies many rows of bfloat16 several times slower than these kernels."""

GATES: Final = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
"""Gate activations, by Transformers' name, and their numbers in C."""


class _Call(ctypes.Structure):
    """``struct Linear``; what C fills in itself is left zero."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "up", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("m", "n", "size", "x_row")),
        ("type", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        ("items", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "chunk")),
    )


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether ``linear`` computes x [..., K] @ weight [N, K]^T here: on a CPU, of a dtype and width it knows, few rows or
    such as torch is slow with."""
    size, kernels = weight.shape[1], library()
    return (
        kernels is not None
        and x.is_cpu
        and weight.is_cpu
        and x.dtype == weight.dtype
        and size % 32 == 0
        and x.numel() > 0
        and (x.numel() <= MAX_ROWS * size or (x.dtype == torch.bfloat16 and kernels.isa in EMULATING))
        and type_number(x.dtype) is not None
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and weight.is_contiguous()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernels: Library | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N], all of one dtype, summed in float32."""
    return _run(x, weight, None, bias, 0, kernels)


def gated(x: Tensor, gate: Tensor, up: Tensor, activation: str, *, kernels: Library | None = None) -> Tensor:
    """``act(x @ gate^T) * (x @ up^T)`` for x [..., K], gate and up [N, K] -> [..., N].

    Both products are rounded to x's dtype, the activation and its product with the other one are not.
    """
    assert gate.shape == up.shape and up.is_contiguous() and up.dtype == x.dtype, "gate and up are alike"
    return _run(x, gate, up, None, GATES[activation], kernels)


def _run(x: Tensor, weight: Tensor, up: Tensor | None, bias: Tensor | None, gate: int, kernels: Library | None) -> Tensor:
    kernels, number = kernels or library(), type_number(x.dtype)
    assert kernels is not None and number is not None, "takes() says where this may be called"
    size, count = x.shape[-1], weight.shape[0]
    assert weight.shape[1] == size and size % 32 == 0 and weight.is_contiguous() and weight.dtype == x.dtype
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = x.new_empty((*x.shape[:-1], count))
    call = _Call(
        rows.data_ptr(),
        weight.data_ptr(),
        None if up is None else up.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows.shape[0],
        count,
        size,
        rows.stride(0),
        number,
        gate,
    )
    kernels.function("linear", ctypes.c_void_p, ctypes.c_int)(ctypes.addressof(call), torch.get_num_threads())
    return y
