"""Attention over keys and values by compiled kernels. Owns what these take."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.attention import ReadsStruct, paged_attention
from octavo.kernels.library import TYPES, Library
from octavo.ops.paged import CacheView
from octavo.ops.reads import Reads
from octavo.ops.torch import attention as plain


def reads_struct(reads: Reads) -> ReadsStruct:
    """A group's reads as C has them."""
    parts = reads.parts
    return ReadsStruct(
        table=reads.table,
        rows=reads.rows,
        fixed=reads.fixed,
        turning=reads.turning,
        block_tokens=reads.block_tokens,
        start=parts.start,
        entry_start_loc=parts.entry_start_loc,
        query_start_loc=parts.query_start_loc,
        positions=parts.query_positions,
        fresh=reads.fresh,
        first=reads.first,
        prefix=reads.law.prefix,
    )


def attend(
    q: Tensor,
    view: CacheView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernels: Library | None = None,
) -> Tensor:
    """``AttendOp``."""
    keys, kinds = view.fields["k"].data, TYPES
    if not (
        view.over.plain
        and q.dtype in kinds
        and keys.dtype in kinds
        and (q.dtype == keys.dtype or keys.dtype == torch.bfloat16)
    ):
        return plain.attend(q, view, scale=scale, softcap=softcap, sinks=sinks)
    return paged_attention(
        q,
        keys,
        view.fields["v"].data,
        view.fresh["k"],
        view.fresh["v"],
        view.reads.once(reads_struct),
        scale=scale,
        softcap=softcap,
        sinks=None if sinks is None else sinks.float(),
        kernels=kernels,
    )
