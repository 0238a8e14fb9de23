"""A sample backend for one op: norms by one call of PyTorch's own, in place of four.

A plugin module: ``BACKENDS`` is what octavo looks for. Owns what that call computes; every other
style is plain PyTorch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.table import Backend, Place
from octavo.ops.torch import pointwise as plain


def norm(x: Tensor, weight: Tensor | None, eps: float, style: str) -> Tensor:
    """``octavo.ops.table.NormOp``: any x and weight that the contract allows."""
    if style not in ("scale", "unit") or (weight is not None and weight.dtype != x.dtype):
        return plain.norm(x, weight, eps, style)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def takes(place: Place) -> bool:
    """Wherever PyTorch's call computes in float32 at least."""
    return place.dtype in (torch.float32, torch.float64)


BACKEND = Backend(name="fused", takes=takes, ops={"norm": norm})
BACKENDS = (BACKEND,)
