"""Entries without heads as compiled kernels read them from pages. Owns what these take."""

from __future__ import annotations

import torch

from octavo.kernels.entries import FORMATS, Paged, Part
from octavo.ops.paged import CacheView

_FP4 = torch.float4_e2m1fn_x2


def paged(view: CacheView) -> Paged:
    """A stream's entries; ``readable`` says of which."""
    parts = []
    for pieces in view.over.entry.parts.values():
        for piece in pieces:
            scaled = piece.coder.scaled if piece.coder else None
            parts.append(
                Part(
                    data=view.fields[piece.name].data,
                    scale=view.fields[scaled[0]].data if scaled else None,
                    block=scaled[1] if scaled else None,
                )
            )
    reads = view.reads
    return Paged(
        table=reads.table_tensor, per_block=reads.block_tokens // view.stride, parts=tuple(parts)
    )


def readable(view: CacheView, *, pairs: bool) -> bool:
    """Whether kernels read the stream's entries: one part or two, in formats that they know. pairs:
    also fp4.
    """
    pieces = [piece for pieces in view.over.entry.parts.values() for piece in pieces]
    return len(pieces) <= 2 and all(
        piece.dtype in FORMATS
        and (pairs or piece.dtype != _FP4)
        and (piece.coder is None or piece.coder.cast or piece.coder.scaled is not None)
        for piece in pieces
    )
