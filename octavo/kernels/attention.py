"""Softmax attention over paged keys and values.

Owns the call of csrc/attention.cpp and ``ReadsStruct``, what a step's layers share of it. Knows
which keys a query sees as numbers only: everything from ``first`` of the query to its own position,
and what lies below ``prefix``. ``ops/oracles/attention.py`` says what it computes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.library import TYPES, Library, library


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadsStruct:
    """``struct Reads``: what one step reads of one group, R requests with E entries and Q queries.
    All arrays are contiguous, and stay as they are while it is used.

    table: int32 [table rows, N], pages by column; rows: int64 [R], the requests' rows in it. fixed,
        turning: block b has column b below ``fixed`` and ``fixed + (b - fixed) % turning`` behind,
        or b everywhere (None). block_tokens: tokens of a block.
    start: int64 [R], the position of each request's first entry. entry_start_loc, query_start_loc:
        int64 [R + 1], its entries and its queries among all.
    positions: int64 [Q], of the queries, ascending within a request.
    fresh: bool [R], True where the step's own entries are not in pages yet.
    first: int64 [Q], the first position that each query sees behind the ``prefix`` positions that
        all see; a prefix of None is all, and ``first`` is not looked at then.
    """

    table: np.ndarray
    rows: np.ndarray
    fixed: int | None
    turning: int
    block_tokens: int
    start: np.ndarray
    entry_start_loc: np.ndarray
    query_start_loc: np.ndarray
    positions: np.ndarray
    fresh: np.ndarray
    first: np.ndarray
    prefix: int | None

    @cached_property
    def address(self) -> int:
        """Where the struct lies, which lives as long as this."""
        return ctypes.addressof(self._struct)

    @cached_property
    def _struct(self) -> ctypes.Structure:
        numbers = (self.rows, self.entry_start_loc, self.query_start_loc, self.start)
        assert all(
            one.dtype == np.int64 and one.flags.c_contiguous
            for one in (*numbers, self.positions, self.first)
        ), "int64, contiguous"
        assert self.table.dtype == np.int32 and self.table.strides[1] == 4, "int32 rows"
        assert self.fresh.dtype == np.bool_ and self.fresh.flags.c_contiguous
        assert (
            len(self.start) + 1
            == len(self.entry_start_loc)
            == len(self.query_start_loc)
            == len(self.rows) + 1
            == len(self.fresh) + 1
        ) and len(self.positions) == len(self.first)
        return _Reads(
            *(_address(one) for one in (self.table, *numbers)),
            *(_address(one) for one in (self.fresh, self.positions, self.first)),
            len(self.start),
            self.table.strides[0] // 4,
            -1 if self.fixed is None else self.fixed,
            max(self.turning, 1),
            self.block_tokens,
            -1 if self.prefix is None else self.prefix,
        )


def _address(array: np.ndarray) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


class _Reads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "rows", "entry_start", "query_start")),
        *((name, ctypes.c_void_p) for name in ("start", "fresh", "position", "first")),
        *(
            (name, ctypes.c_int64)
            for name in ("requests", "table_row", "fixed", "turning", "block_tokens", "prefix")
        ),
    )


_ATTENTION = Struct("4P P3q P3q P2q P2q 6q 2f 2i")
"""``struct Attention``: q, sinks, out, reads; k and v with strides of page, head and entry; the
fresh ones with those of token and head; q_token, q_head, heads, kv_heads, dim, value_dim; scale,
softcap; q_type, kv_type.
"""


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    reads: ReadsStruct,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernels: Library | None = None,
) -> Tensor:
    """Attention of a step's queries: q [Q, Hq, D] -> [Q, Hq, Dv] in q's dtype, summed in float32.

    keys, values: [starts, Hkv, entries, D or Dv], fields over the arena (``FieldView.data``); pages
        are their first index.
    fresh_keys, fresh_values: [E, Hkv, D or Dv], the step's own in the fields' dtype; read of fresh
        requests only.
    scale: factor of scores. softcap: scores become softcap * tanh(score / softcap). sinks: float32
        [Hq], logits without value.
    """
    kernels = kernels or library()
    q_type, kv_type = TYPES[q.dtype], TYPES[keys.dtype]
    assert kernels is not None, "there are compiled kernels"
    assert keys.dtype == values.dtype == fresh_keys.dtype == fresh_values.dtype, (
        "keys and values have one dtype"
    )
    assert (
        q.stride(2)
        == keys.stride(3)
        == values.stride(3)
        == fresh_keys.stride(2)
        == fresh_values.stride(2)
        == 1
    )
    assert (
        keys.shape[3] == q.shape[2] == fresh_keys.shape[2]
        and values.shape[3] == fresh_values.shape[2]
    )
    assert (
        keys.shape[1] == values.shape[1] == fresh_keys.shape[1] and q.shape[1] % keys.shape[1] == 0
    )
    assert keys.shape[2] == values.shape[2] == reads.block_tokens, (
        "a block's entries lie in one page"
    )
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
    call = _ATTENTION.pack(
        *(q.data_ptr(), 0 if sinks is None else sinks.data_ptr(), out.data_ptr(), reads.address),
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(fresh_keys.data_ptr(), *fresh_keys.stride()[:2]),
        *(fresh_values.data_ptr(), *fresh_values.stride()[:2]),
        *(*q.stride()[:2], q.shape[1], keys.shape[1], q.shape[2], values.shape[3]),
        *(scale, softcap or 0.0, q_type, kv_type),
    )
    kernels.function("attention", ctypes.c_void_p, ctypes.c_int)(call, torch.get_num_threads())
    return out
