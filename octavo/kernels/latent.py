"""Attention over entries that all heads share and that are key and value at once: latents, and
compressed entries.

Owns the call of csrc/latent.cpp and ``Near``. Knows no kind: which entries are read comes as
numbers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.entries import Paged, PagedStruct
from octavo.kernels.library import Library, library, type_number


@dataclass(frozen=True, kw_only=True, eq=False)
class Near:
    """Entries beside the pages. rows: [P, D]. first, count: int64 [n, 2]; query i reads two runs of
    rows, the latter behind the former.
    """

    rows: Tensor
    first: Tensor
    count: Tensor


class _Call(ctypes.Structure):
    """``struct Latent``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "sinks", "out", "table", "visible", "chosen")),
        *((name, ctypes.c_void_p) for name in ("near", "near_low", "near_count")),
        ("entries", PagedStruct),
        *(
            (name, ctypes.c_int64)
            for name in ("count", "heads", "dim", "value_dim", "chosen_row", "near_row")
        ),
        ("scale", ctypes.c_float),
        ("q_type", ctypes.c_int32),
        ("near_type", ctypes.c_int32),
    )


def latent_attention(
    q: Tensor,
    entries: Paged | None,
    rows: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    chosen: Tensor | None = None,
    near: Near | None = None,
    sinks: Tensor | None = None,
    kernels: Library | None = None,
) -> Tensor:
    """One softmax of each query's heads over all it reads: q [n, H, D] -> [n, H, value_dim] in q's
    dtype, summed in float32.

    rows: int64 [n], where the table has each query's request. visible: int64 [n]; query i reads its
    first ``visible[i]`` entries, or those that ``chosen`` int64 [n, k] names first. An entry's
    first ``value_dim`` elements are its value.
    scale: factor of scores. sinks: float32 [H], logits without value. entries, visible: both None
        where all is near.
    """
    kernels, number = kernels or library(), type_number(q.dtype)
    assert kernels is not None and number is not None, "there are compiled kernels, for the dtype"
    assert (entries is None) == (visible is None), "entries are read in a number"
    assert entries is None or entries.size == q.shape[2] >= value_dim, (
        "an entry is as wide as a query"
    )
    assert chosen is None or (chosen.dtype == torch.int64 and chosen.stride(1) == 1)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    q, rows = q.contiguous(), rows.contiguous()
    visible = None if visible is None else visible.contiguous()
    assert all(
        one.dtype == torch.int64 and len(one) == len(q)
        for one in (rows, visible)
        if one is not None
    )
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    nearby: tuple[Tensor | None, ...] = (None, None, None)
    row, near_number = 0, 0
    if near is not None:
        known = type_number(near.rows.dtype)
        assert known is not None and near.rows.stride(1) == 1 and near.rows.shape[1] == q.shape[2]
        assert all(
            x.dtype == torch.int64 and x.shape == (len(q), 2) and x.is_contiguous()
            for x in (near.first, near.count)
        )
        nearby, row, near_number = (near.rows, near.first, near.count), near.rows.stride(0), known
    call = _Call(
        *(
            None if one is None else one.data_ptr()
            for one in (q, sinks, out, rows, visible, chosen, *nearby)
        ),
        PagedStruct() if entries is None else entries.struct,
        *(*q.shape, value_dim, 0 if chosen is None else chosen.stride(0), row),
        *(scale, number, near_number),
    )
    if len(q):
        kernels.function("latent", ctypes.c_void_p, ctypes.c_int)(
            ctypes.addressof(call), torch.get_num_threads()
        )
    return out
