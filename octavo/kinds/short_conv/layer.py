"""The torch layer of a gated short convolution (LFM2), with the checkpoint's module names."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.short_conv.spec import ShortConv
from octavo.nn.conv import CausalConv
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.step import Caches, Step


class ShortConvLayer(Module):
    """``out(c * conv(b * u))`` with b, c and u projections of the hidden state. Stream ``state``,
    field conv.
    """

    def __init__(self, kind: ShortConv, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.kind, self.hidden_size = kind, kind.hidden_size
        size = kind.hidden_size
        self.conv = CausalConv(size, kind.kernel, bias=kind.bias, dtype=dtype, device=device)
        self.in_proj = Linear(size, 3 * size, bias=kind.bias, dtype=dtype, device=device)
        self.out_proj = Linear(size, size, bias=kind.bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the inputs that the cache's batch asks for."""
        before, after, u = self.in_proj(hidden).chunk(3, dim=-1)
        return self.out_proj(after * self.conv(before * u, caches["state"], "conv"))
