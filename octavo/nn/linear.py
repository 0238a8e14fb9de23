"""Linear layers as decoding wants them: few rows take a compiled kernel, everything else torch.

Owns the choice between the two. Knows no weights' names and no caches.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.linear import linear, takes


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N]."""
    return linear(x, weight, bias) if takes(x, weight) else F.linear(x, weight, bias)


class Linear(nn.Linear):
    """``nn.Linear`` through ``project``."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return project(x, self.weight, self.bias)
