"""The torch layer of lightning attention, with the module names of MiniMax's checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.lightning.spec import Lightning
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.step import Caches, Step
from octavo.ops.activation import ACTIVATIONS
from octavo.ops.ragged import work_dtype
from octavo.ops.states import State


class LightningLayer(Module):
    """Activated q, k and v, a decay per head, a norm over all heads and a gate. Stream ``state``,
    field recurrent.
    """

    def __init__(self, kind: Lightning, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.kind, self.hidden_size, self.activation = (
            kind,
            kind.hidden_size,
            ACTIVATIONS[kind.activation],
        )

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        inner = kind.num_heads * kind.head_dim
        self.qkv_proj = linear(kind.hidden_size, 3 * inner)
        self.output_gate = linear(kind.hidden_size, inner)
        self.norm = Norm(inner, kind.norm_eps, "scale", dtype=dtype, device=device)
        self.out_proj = linear(inner, kind.hidden_size)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, d] -> q, k, v [T, H, D], which lie head after head in their projection."""
        q, k, v = (
            self.activation(self.qkv_proj(hidden))
            .view(-1, self.kind.num_heads, 3 * self.kind.head_dim)
            .chunk(3, dim=-1)
        )
        return q, k, v

    def output(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """mixed [T, H, D] -> [T, d]."""
        return self.out_proj(
            self.output_gate(hidden).sigmoid() * self.norm(mixed.flatten(1).to(hidden.dtype))
        )

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the states that the cache's batch asks for."""
        view, slopes = caches["state"], self.kind.slopes
        decay = step.shared(
            slopes, lambda: -torch.tensor(slopes, dtype=work_dtype(hidden), device=hidden.device)
        )
        state = State(view=view, name="recurrent")
        mixed = self.ops.decayed_scan(*self.heads(hidden), decay, state)
        return self.output(mixed, hidden)
