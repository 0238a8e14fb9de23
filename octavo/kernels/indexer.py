"""Index scores over paged keys, and the choice of the highest.

Owns the calls of csrc/indexer.cpp. ``octavo/ops/oracles`` says what they compute.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from octavo.kernels.entries import Paged, PagedStruct
from octavo.kernels.library import Library, library, type_number


class _Scores(ctypes.Structure):
    """``struct Index``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "weights", "table", "visible", "scores")),
        ("keys", PagedStruct),
        *((name, ctypes.c_int64) for name in ("count", "length", "heads", "dim")),
        ("q_type", ctypes.c_int32),
    )


class _Choice(ctypes.Structure):
    """``struct Choice``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "visible", "out")),
        *((name, ctypes.c_int64) for name in ("count", "length", "k")),
    )


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Paged,
    rows: Tensor,
    visible: Tensor,
    *,
    length: int,
    kernels: Library | None = None,
) -> Tensor:
    """``sum_h weights[h] * relu(q[h] . key)`` (DeepSeek-V3.2, equation 1): float32 [n, length],
    summed in float32.

    q: [n, H, D]. weights: [n, H], all constant factors included. rows: int64 [n], where the table
        has each query's request.
    visible: int64 [n]; query i is given the scores of its first ``visible[i]`` entries, and rubbish
        behind them.
    """
    kernels, number = kernels or library(), type_number(q.dtype)
    assert kernels is not None and number is not None, "there are compiled kernels, for the dtype"
    assert len(keys.parts) == 1 and keys.size == q.shape[2], "a key is one part as wide as a query"
    assert rows.dtype == visible.dtype == torch.int64 and len(rows) == len(visible) == len(
        weights
    ) == len(q)
    q, weights, rows, visible = (
        q.contiguous(),
        weights.float().contiguous(),
        rows.contiguous(),
        visible.contiguous(),
    )
    scores = torch.empty(q.shape[0], length)
    call = _Scores(
        *(one.data_ptr() for one in (q, weights, rows, visible, scores)),
        keys.struct,
        q.shape[0],
        length,
        *q.shape[1:],
        number,
    )
    kernels.function("index_scores", ctypes.c_void_p, ctypes.c_int)(
        ctypes.addressof(call), torch.get_num_threads()
    )
    return scores


def choose(scores: Tensor, visible: Tensor, k: int, *, kernels: Library | None = None) -> Tensor:
    """The ``k`` highest of each query's visible scores; of equal ones those with the lowest number.

    scores: float32 [n, L]; visible: int64 [n], at most L. Returns int64 [n, min(k, L)]: ascending,
        -1 where fewer are visible.
    """
    kernels = kernels or library()
    assert kernels is not None and scores.dtype == torch.float32 and visible.dtype == torch.int64
    scores, visible = scores.contiguous(), visible.contiguous()
    out = visible.new_empty(scores.shape[0], min(k, scores.shape[1]))
    call = _Choice(
        scores.data_ptr(), visible.data_ptr(), out.data_ptr(), *scores.shape, out.shape[1]
    )
    if out.numel():
        kernels.function("choose", ctypes.c_void_p, ctypes.c_int)(
            ctypes.addressof(call), torch.get_num_threads()
        )
    return out
