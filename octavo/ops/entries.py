"""Entries without heads of streams that let nothing go: stored and read through their codec.

Owns the one way in and the ways out of such a stream: what a step adds, all of a request, all of a bucket, and chosen ones.
Knows no kind; fields and their dtypes are the stream's (``ops/codec.py``). Streams whose law is ``Everything`` are written
ahead of all reads, so what is read passed through the cache's dtype, also within one step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.codec import decode, encode
from octavo.ops.paged import CacheView, DecodeBucket, RequestRead


def keep(view: CacheView, **entry: Tensor) -> None:
    """Store the step's entries, [T, elements] for each part, ahead of all reads."""
    view.begin(**{name: made[:, None] for name, made in encode(entry, view.fields).items()})
    view.end()


def of_request(view: CacheView, request: RequestRead, dtype: torch.dtype) -> dict[str, Tensor]:
    """All entries of a request up to its last token of the step, [L, elements] for each part."""
    assert not request.fresh, "the stream is written ahead of all reads"
    return decode({name: request.gather_head(field, 0) for name, field in view.fields.items()}, dtype=dtype)


def of_bucket(view: CacheView, bucket: DecodeBucket, dtype: torch.dtype) -> dict[str, Tensor]:
    """All entries of a bucket's B requests, [B, N * block_tokens, elements] for each part; 0 in rows not to be read."""
    pages, stored = bucket.pages.flatten(), {}
    for name, field in view.fields.items():
        stored[name] = field.gather_head(pages, 0)
    entry = decode(stored, dtype=dtype)
    for part in entry.values():
        # A weight of zero does not hide a NaN.
        part[bucket.hidden_page, bucket.hidden_row] = 0
    return {name: part.reshape(bucket.pages.shape[0], -1, part.shape[-1]) for name, part in entry.items()}


def of_numbers(view: CacheView, requests: Tensor, numbers: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Entries ``numbers`` of ``requests``, int64 of one shape: [*shape, elements] for each part; below 0, the first one's."""
    return decode(view.take(requests, numbers), dtype=dtype)
