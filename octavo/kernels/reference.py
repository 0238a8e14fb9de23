"""What the compiled kernels compute, written slowly: the oracle of ``tests/kernels``.

Owns nothing the engine runs. Everything is float64 and shares no code with the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N], in float64."""
    y = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return y if bias is None else y + bias.double()


def gated(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(x @ gate^T) * (x @ up^T)``, in float64 but for the products, which are rounded to x's dtype."""
    g, u = (linear(x, weight).to(x.dtype).double() for weight in (gate, up))
    if activation == "silu":
        return g * torch.sigmoid(g) * u
    return F.gelu(g, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * u
