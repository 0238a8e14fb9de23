"""Normalisation with a weight. Owns ``Norm``; ``Ops.norm`` says in which ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.nn.module import Module
from octavo.spec.attention import NormStyle


class Norm(Module):
    """``Ops.norm`` of the last axis in one of its styles, each of which has a weight."""

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

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], computed in float32 at least."""
        return self.ops.norm(x, self.weight, self.eps, self.style)
