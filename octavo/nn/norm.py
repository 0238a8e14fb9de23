"""Normalisation in the ways models do and round it.

Owns ``Norm``: RMSNorm (Zhang and Sennrich 2019) and LayerNorm without bias. The order of operations
is Transformers', so that float32 results agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.kernels.pointwise import normed, takes
from octavo.spec.attention import NormStyle


def unit(x: Tensor, eps: float) -> Tensor:
    """``x / rms(x)`` over the last axis, computed in float32 at least: RMSNorm without a weight."""
    if takes(x):
        return normed(x, None, eps, "unit")
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Norm(nn.Module):
    """``x / rms(x)`` times the weight (``scale``), the same rounded last (``wide``), or times one
    plus the weight and rounded last (``offset``); with the mean subtracted first, times the weight
    and rounded last (``center``).
    """

    def __init__(
        self,
        size: int,
        eps: float,
        style: NormStyle,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(size, dtype=dtype, device=device), requires_grad=False
        )
        self.eps, self.style = eps, style

    def __call__(self, x: Tensor) -> Tensor:
        """``forward``, at once and without hooks: nn.Module's own way there costs a microsecond."""
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], computed in float32 at least."""
        if takes(x) and x.dtype == self.weight.dtype:
            return normed(x, self.weight, self.eps, self.style)
        wide = x if x.dtype == torch.float64 else x.float()
        if self.style == "center":
            wide = wide - wide.mean(-1, keepdim=True)
        normal = unit(wide, self.eps)
        if self.style in ("center", "wide"):
            return (self.weight.to(wide.dtype) * normal).to(x.dtype)
        if self.style == "offset":
            return (normal * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * normal.to(x.dtype)
