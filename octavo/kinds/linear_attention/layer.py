"""The torch layer of plain linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.linear_attention.spec import LinearAttention
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.step import Caches, Step
from octavo.ops.states import states


class LinearAttentionLayer(Module):
    """Projections around sums over all earlier tokens. Stream ``state``, fields recurrent and
    normaliser.
    """

    def __init__(
        self, kind: LinearAttention, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.kind, self.hidden_size = kind, kind.hidden_size
        inner = kind.num_heads * kind.head_dim

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        self.q_proj, self.k_proj = linear(kind.hidden_size, inner), linear(kind.hidden_size, inner)
        self.v_proj, self.o_proj = linear(kind.hidden_size, inner), linear(inner, kind.hidden_size)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, d] -> q, k, v [T, H, D]."""
        split = (-1, self.kind.num_heads, self.kind.head_dim)
        return (
            self.q_proj(hidden).view(split),
            self.k_proj(hidden).view(split),
            self.v_proj(hidden).view(split),
        )

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the states that the cache's batch asks for."""
        sums, keys = states(caches["state"], "recurrent", "normaliser")
        mixed = self.ops.feature_scan(*self.heads(hidden), sums, keys)
        return self.o_proj(mixed.flatten(1).to(hidden.dtype))
