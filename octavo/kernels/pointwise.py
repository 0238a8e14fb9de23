"""What a step does to single rows: norms, rotation, and storing entries in pages, each in one call.

Owns the calls of csrc/pointwise.cpp. ``nn/norm.py`` and ``nn/rope.py`` say what they compute.
"""

from __future__ import annotations

import ctypes
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.kernels.library import Library, library, type_number

STYLES = MappingProxyType({"unit": 0, "scale": 1, "wide": 2, "offset": 3, "center": 4})
"""How a norm rounds and weighs (``nn.norm.Norm``; ``unit`` has no weight), and the numbers in C."""


class _Heads(ctypes.Structure):
    """``struct Heads``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "cosine", "sine", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "size", "x_token", "x_head", "rotated")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("style", "interleaved", "type")),
    )


class _Scatter(ctypes.Structure):
    """``struct Scatter``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "field", "tokens", "pages", "rows")),
        *((name, ctypes.c_int64) for name in ("count", "heads", "entry", "value_token", "value_head", "page", "head", "row")),
    )


def takes(x: Tensor) -> bool:
    """Whether rows of x are normalised and rotated here: on a CPU, of a dtype that kernels know, without gradients."""
    return (
        x.is_cpu
        and type_number(x.dtype) is not None
        and not (torch.is_grad_enabled() and x.requires_grad)
        and x.stride(-1) == 1
        and library() is not None
    )


def normed(x: Tensor, weight: Tensor | None, eps: float, style: str, *, kernels: Library | None = None) -> Tensor:
    """``nn.norm.Norm`` of the last axis of x, weight [size] in x's dtype, or ``nn.norm.unit`` without."""
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    assert (weight is None) == (style == "unit"), "all norms but unit have a weight"
    return _heads(rows, weight, eps, STYLES[style], None, None, False, kernels).view_as(x)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False, kernels: Library | None = None) -> Tensor:
    """``nn.rope.rotate`` of x [T, heads, size] by tables [T, 1, rotated] in x's dtype, rounded once."""
    return _heads(x, None, 0.0, -1, cosine, sine, interleaved, kernels)


def normed_rotated(
    x: Tensor,
    weight: Tensor,
    eps: float,
    style: str,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    kernels: Library | None = None,
) -> Tensor:
    """``rotated`` of ``normed``, to the same numbers, in one call."""
    return _heads(x, weight, eps, STYLES[style], cosine, sine, interleaved, kernels)


def _heads(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    style: int,
    cosine: Tensor | None,
    sine: Tensor | None,
    interleaved: bool,
    kernels: Library | None,
) -> Tensor:
    kernels, number, (tokens, heads, size) = kernels or library(), type_number(x.dtype), x.shape
    assert kernels is not None and number is not None and x.stride(2) == 1, "takes() says where this may be called"
    assert weight is None or (weight.dtype == x.dtype and weight.shape == (size,) and weight.is_contiguous())
    turned = 0
    if cosine is not None and sine is not None:
        turned = cosine.shape[-1]
        assert cosine.shape == sine.shape == (tokens, 1, turned) and turned <= size and turned % 2 == 0
        assert cosine.dtype == sine.dtype == x.dtype
        cosine, sine = cosine.contiguous(), sine.contiguous()
    y = x.new_empty((tokens, heads, size))
    call = _Heads(
        x.data_ptr(),
        None if weight is None else weight.data_ptr(),
        None if cosine is None else cosine.data_ptr(),
        None if sine is None else sine.data_ptr(),
        y.data_ptr(),
        tokens,
        heads,
        size,
        x.stride(0),
        x.stride(1),
        turned,
        eps,
        style,
        interleaved,
        number,
    )
    kernels.function("heads", ctypes.c_void_p, ctypes.c_int)(ctypes.addressof(call), torch.get_num_threads())
    return y


def scatters(field: Tensor, values: Tensor) -> bool:
    """Whether ``scatter`` stores values [T, heads, ...] in pages of field [starts, heads, entries, ...]: bytes on a CPU."""
    width = prod(field.shape[3:])
    return (
        field.is_cpu
        and values.is_cpu
        and values.dtype == field.dtype
        and (values.is_contiguous() or values[0, 0].is_contiguous())
        and field.stride(2) == width
        and library() is not None
    )


def scatter(
    field: Tensor, pages: Tensor, rows: Tensor, values: Tensor, tokens: Tensor, *, kernels: Library | None = None
) -> None:
    """Store ``values[tokens[i]]`` in row ``rows[i]`` of page ``pages[i]`` of a field; int64 [W] each, contiguous."""
    kernels, size = kernels or library(), field.element_size()
    assert kernels is not None and values.shape[1:] == (field.shape[1], *field.shape[3:]), "entries of the field"
    assert all(one.dtype == torch.int64 and one.is_contiguous() for one in (pages, rows, tokens))
    assert len(pages) == len(rows) == len(tokens)
    call = _Scatter(
        *(one.data_ptr() for one in (values, field, tokens, pages, rows)),
        len(tokens),
        field.shape[1],
        size * prod(field.shape[3:]),
        *(size * stride for stride in (*values.stride()[:2], *field.stride()[:3])),
    )
    kernels.function("scatter", ctypes.c_void_p, ctypes.c_int)(ctypes.addressof(call), 1)
