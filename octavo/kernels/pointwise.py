"""What a step does to single rows: norms, rotation, storing entries in pages, finding the largest
logit, each in one call.

Owns the calls of csrc/pointwise.cpp. ``ops/oracles/pointwise.py`` says what they compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from struct import Struct
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.kernels.library import TYPES, Library, library, type_number

STYLES = MappingProxyType({"unit": 0, "scale": 1, "wide": 2, "offset": 3, "center": 4})
"""How a norm rounds and weighs (``ops.table.NormOp``), and the numbers in C."""

ARGMAX_PART = 1 << 15
"""Elements of a row that one job looks at, about."""

_HEADS = Struct("5P 6q f 3i")
"""``struct Rows``: x, weight, cosine, sine, y; tokens, heads, size, x_token, x_head, rotated; eps;
style, interleaved, type.
"""

_SCATTER = Struct("5P 8q")
"""``struct Scatter``: values, field, tokens, pages, rows; count, heads, entry, value_token,
value_head, page, head, row.
"""


class _Argmax(ctypes.Structure):
    """``struct Argmax``; what C fills in itself is left zero."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "places")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "parts")),
        ("type", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("most", "where")),
    )


def normed(
    x: Tensor, weight: Tensor | None, eps: float, style: str, *, kernels: Library | None = None
) -> Tensor:
    """The last axis of x normalised (``ops.table.NormOp``), weight [size] in x's dtype or None."""
    assert (weight is None) == (style == "unit"), "all norms but unit have a weight"
    rows = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
    y = _heads(rows, weight, eps, STYLES[style], None, None, False, kernels)
    return y if rows is x else y.view_as(x)


def rotated(
    x: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    interleaved: bool = False,
    kernels: Library | None = None,
) -> Tensor:
    """The front of x [T, heads, size] rotated by tables [T, 1, rotated] in x's dtype, rounded
    once.
    """
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
    """x [T, heads, size], or [T, size]."""
    kernels, dtype = kernels or library(), x.dtype
    tokens, *more, size = x.shape
    heads, strides = more[0] if more else 1, x.stride()
    assert kernels is not None and strides[-1] == 1, "elements of a row lie side by side"
    weight_at = cosine_at = sine_at = turned = 0
    if weight is not None:
        assert weight.dtype == dtype and weight.numel() == size and weight.is_contiguous()
        weight_at = weight.data_ptr()
    if cosine is not None and sine is not None:
        turned = cosine.shape[-1]
        assert (
            cosine.shape == sine.shape == (tokens, 1, turned) and turned <= size and turned % 2 == 0
        )
        assert (
            cosine.dtype == sine.dtype == dtype and cosine.is_contiguous() and sine.is_contiguous()
        )
        cosine_at, sine_at = cosine.data_ptr(), sine.data_ptr()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = _HEADS.pack(
        *(x.data_ptr(), weight_at, cosine_at, sine_at, y.data_ptr()),
        *(tokens, heads, size, strides[0], strides[-2], turned),
        *(eps, style, interleaved, TYPES[dtype]),
    )
    kernels.function("heads", ctypes.c_void_p, ctypes.c_int)(call, torch.get_num_threads())
    return y


def scatter(
    fields: Sequence[Tensor],
    pages: Tensor,
    rows: Tensor,
    values: Sequence[Tensor],
    tokens: Tensor,
    *,
    kernels: Library | None = None,
) -> None:
    """Store ``values[f][tokens[i]]`` in row ``rows[i]`` of page ``pages[i]`` of ``fields[f]``;
    int64 [W] each, contiguous.
    """
    kernels = kernels or library()
    assert kernels is not None, "there are compiled kernels"
    assert (
        pages.dtype == rows.dtype == tokens.dtype == torch.int64
        and pages.shape == rows.shape == tokens.shape
    )
    assert pages.is_contiguous() and rows.is_contiguous() and tokens.is_contiguous()
    places = tokens.data_ptr(), pages.data_ptr(), rows.data_ptr(), tokens.numel()
    calls = b"".join([_scatter(*pair, places) for pair in zip(fields, values, strict=True)])
    kernels.function("scatter", ctypes.c_void_p, ctypes.c_int)(calls, len(fields))


def _scatter(field: Tensor, values: Tensor, places: tuple[int, int, int, int]) -> bytes:
    size, (_, heads, _, *entry) = field.element_size(), field.shape
    assert values.shape[1:] == (heads, *entry) and values.dtype == field.dtype, (
        "entries of the field"
    )
    page, head, row = field.stride()[:3]
    token, part = values.stride()[:2]
    strides = size * prod(entry), size * token, size * part, size * page, size * head, size * row
    return _SCATTER.pack(values.data_ptr(), field.data_ptr(), *places, heads, *strides)


def argmax(x: Tensor, *, kernels: Library | None = None) -> Tensor:
    """The place of the largest element of every row of x [n, size], the first of equal ones: int64
    [n].

    NaN is passed over; a row of nothing else gives 0.
    """
    kernels, number = kernels or library(), type_number(x.dtype)
    assert kernels is not None and number is not None and x.is_contiguous()
    places = torch.empty(x.shape[0], dtype=torch.int64)
    call = _Argmax(
        x.data_ptr(), places.data_ptr(), *x.shape, max(1, x.shape[1] // ARGMAX_PART), number
    )
    kernels.function("argmax", ctypes.c_void_p, ctypes.c_int)(
        ctypes.addressof(call), torch.get_num_threads()
    )
    return places
