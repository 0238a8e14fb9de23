"""Entries without heads of streams that let nothing go: stored and read through their codec.

Owns the one way in and the ways out of such a stream: what a step adds; all of a request; a
bucket's, piece by piece; chosen ones; and what compiled kernels are given to read for themselves.
Knows no kind; fields and their dtypes are the stream's (``ops/codec.py``). Streams whose law is
``Everything`` are written ahead of all reads, so what is read passed through the cache's dtype,
also within one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from octavo.kernels.entries import Paged, Part
from octavo.ops.codec import BLOCKS, decode, encode
from octavo.ops.paged import CacheView, DecodeBucket, RequestRead

PIECE_TOKENS: Final = 4096
"""Most tokens of a bucket that are copied at once, as long as a request has one block: what is
copied is used in the caches.
"""


def paged(view: CacheView, *, stride: int = 1) -> Paged:
    """A stream's entries of ``stride`` tokens each as kernels read them; whether they can, their
    ``takes`` says.
    """
    scale = view.fields.get("scale")
    parts = []
    for name, field in view.fields.items():
        block = BLOCKS.get((name, field.data.dtype)) if scale is not None else None
        if name != "scale":
            parts.append(
                Part(
                    data=field.data,
                    scale=scale.data if scale is not None and block else None,
                    block=block,
                )
            )
    return Paged(
        table=view.batch.table, per_block=view.batch.block_tokens // stride, parts=tuple(parts)
    )


def keep(view: CacheView, **entry: Tensor) -> None:
    """Store the step's entries, [T, elements] for each part, ahead of all reads."""
    view.begin(**{name: made[:, None] for name, made in encode(entry, view.fields).items()})
    view.end()


def of_request(view: CacheView, request: RequestRead, dtype: torch.dtype) -> dict[str, Tensor]:
    """All entries of a request up to its last token of the step, [L, elements] for each part."""
    assert not request.fresh, "the stream is written ahead of all reads"
    return decode(
        {name: request.gather_head(field, 0) for name, field in view.fields.items()}, dtype=dtype
    )


def of_bucket(
    view: CacheView, bucket: DecodeBucket, dtype: torch.dtype
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """All entries of a bucket's B requests, some rows of all at a time: (which rows, [B, rows,
    elements] for each part).

    Hidden rows hold anything, NaN included.
    """
    count, blocks = bucket.pages.shape
    size = bucket.hidden.shape[1] // blocks
    step = max(1, PIECE_TOKENS // (count * size))
    for first in range(0, blocks, step):
        pages = bucket.pages[:, first : first + step]
        stored = {
            name: field.gather_head(pages.flatten(), 0) for name, field in view.fields.items()
        }
        entry = {
            name: part.reshape(count, -1, part.shape[-1])
            for name, part in decode(stored, dtype=dtype).items()
        }
        yield slice(first * size, (first + pages.shape[1]) * size), entry


def of_numbers(
    view: CacheView, requests: Tensor, numbers: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Entries ``numbers`` of ``requests``, int64 of one shape: [*shape, elements] for each part;
    below 0, the first one's.
    """
    return decode(view.take(requests, numbers), dtype=dtype)
