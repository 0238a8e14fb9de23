"""RMS normalisation in the two ways models round it.

Owns ``RMSNorm`` (Zhang and Sennrich 2019). The order of operations is Transformers', so that float32 results agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.spec.attention import NormStyle


class RMSNorm(nn.Module):
    """``x / rms(x)`` times the weight (``scale``) or times one plus the weight, rounded last (``offset``)."""

    def __init__(self, size: int, eps: float, style: NormStyle, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self.offset = style == "offset"

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], computed in float32 at least."""
        wide = x if x.dtype == torch.float64 else x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normal * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * normal.to(x.dtype)
