"""What ops do to single rows, slowly. Results are float64, or what is stored as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, eps: float, style: str) -> Tensor:
    """``NormOp``, but for what is rounded in between."""
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        centred = row - row.sum() / len(row) if style == "center" else row
        normal = centred / ((centred * centred).sum() / len(row) + eps).sqrt()
        if weight is not None:
            normal = normal * (weight.double() + (1 if style == "offset" else 0))
        rows.append(normal)
    return torch.stack(rows).view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """``RotateOp``, pair by pair: each element times its own cosine, plus the other one, turned,
    times its own sine.
    """
    out, size = x.double().clone(), cos.shape[-1]
    for pair in range(size // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
        first, second = x[..., a].double(), x[..., b].double()
        out[..., a] = first * cos[..., a].double() - second * sin[..., a].double()
        out[..., b] = second * cos[..., b].double() + first * sin[..., b].double()
    return out


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


def store(
    fields: Sequence[Tensor], pages: Tensor, rows: Tensor, values: Sequence[Tensor], entries: Tensor
) -> None:
    """``StoreOp``, byte by byte."""
    for field, made in zip(fields, values, strict=True):
        to, given = field.view(torch.uint8), made.contiguous().view(torch.uint8)
        for page, row, entry in zip(pages.tolist(), rows.tolist(), entries.tolist(), strict=True):
            to[page, :, row] = given[entry]


def gather(field: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """``GatherOp``, byte by byte."""
    places = zip(pages.flatten().tolist(), rows.flatten().tolist(), strict=True)
    kept = field.view(torch.uint8)
    found = [kept[page, :, row] for page, row in places]
    return torch.stack(found).view(field.dtype).view(*pages.shape, *field[0, :, 0].shape)


def greedy(logits: Tensor) -> Tensor:
    """``GreedyOp``."""
    return torch.tensor([row.index(max(row)) for row in logits.tolist()])
