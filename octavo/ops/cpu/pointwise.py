"""Norms, rotation, stores and the largest logit by compiled kernels. Owns what these take."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from octavo.kernels import pointwise as kernels
from octavo.kernels.library import TYPES
from octavo.ops.torch import pointwise as plain


def norm(x: Tensor, weight: Tensor | None, eps: float, style: str) -> Tensor:
    """``NormOp``."""
    if x.dtype not in TYPES or x.stride(-1) != 1:
        return plain.norm(x, weight, eps, style)
    if weight is None or weight.dtype == x.dtype:
        return kernels.normed(x, weight, eps, style)
    if weight.dtype == torch.float32 and style != "scale":
        # Rounded last, so that it may as well be computed in the weight's dtype.
        return kernels.normed(x.float(), weight, eps, style).to(x.dtype)
    return plain.norm(x, weight, eps, style)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """``RotateOp``."""
    if x.dtype not in TYPES or x.dtype != cos.dtype or x.stride(-1) != 1:
        return plain.rotate(x, cos, sin, interleaved=interleaved)
    return kernels.rotated(x, cos, sin, interleaved=interleaved)


def norm_rotate(
    x: Tensor,
    weight: Tensor,
    eps: float,
    style: str,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """``NormRotateOp``."""
    if x.dtype not in TYPES or not x.dtype == weight.dtype == cos.dtype or x.stride(-1) != 1:
        return rotate(norm(x, weight, eps, style), cos, sin, interleaved=interleaved)
    return kernels.normed_rotated(x, weight, eps, style, cos, sin, interleaved=interleaved)


def store(
    fields: Sequence[Tensor], pages: Tensor, rows: Tensor, values: Sequence[Tensor], entries: Tensor
) -> None:
    """``StoreOp``."""
    for field, made in zip(fields, values, strict=True):
        if field.stride(2) != prod(field.shape[3:]) or not (
            made.is_contiguous() or made[0, 0].is_contiguous()
        ):
            return plain.store(fields, pages, rows, values, entries)
    kernels.scatter(fields, pages, rows, values, entries)


def greedy(logits: Tensor) -> Tensor:
    """``GreedyOp``."""
    if logits.dtype in TYPES and logits.is_contiguous():
        return kernels.argmax(logits)
    return plain.greedy(logits)
