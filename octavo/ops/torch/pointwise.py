"""What a step does to single rows, in plain PyTorch: norms, rotation, storing entries, the largest
logit.

Owns the formulas. The order of operations is Transformers', so that float32 results agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, eps: float, style: str) -> Tensor:
    """``NormOp``: RMSNorm (Zhang and Sennrich 2019), LayerNorm without bias as ``center``."""
    wide = x if x.dtype == torch.float64 else x.float()
    if style == "center":
        wide = wide - wide.mean(-1, keepdim=True)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normal.to(x.dtype)
    if style in ("center", "wide"):
        return (weight.to(wide.dtype) * normal).to(x.dtype)
    if style == "offset":
        return (normal * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return weight * normal.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """``RotateOp``."""
    front, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        crossed = torch.stack((-front[..., 1::2], front[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = front.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    turned = front * cos + crossed * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


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
    return rotate(norm(x, weight, eps, style), cos, sin, interleaved=interleaved)


def indexed(values: Tensor) -> Tensor:
    """The same memory in a dtype that PyTorch can index: floats of a byte and less are bytes."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def store(
    fields: Sequence[Tensor], pages: Tensor, rows: Tensor, values: Sequence[Tensor], entries: Tensor
) -> None:
    """``StoreOp``."""
    for field, made in zip(fields, values, strict=True):
        indexed(field)[pages, :, rows] = indexed(made).index_select(0, entries)


def gather(field: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """``GatherOp``."""
    return indexed(field)[pages, :, rows].view(field.dtype)


def greedy(logits: Tensor) -> Tensor:
    """``GreedyOp``."""
    return logits.argmax(dim=1)
