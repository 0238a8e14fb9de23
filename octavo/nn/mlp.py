"""The MLP of a layer, with a gate (Shazeer 2020) or without. Owns both."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.ops.activation import ACTIVATIONS, Gating
from octavo.ops.table import Product


class MLP(Module):
    """``down(act(gate(x)) * up(x))``, with gate and up within ``limit`` where there is one."""

    product: Product | None = None

    def __init__(
        self,
        size: int,
        inner: int,
        activation: str,
        *,
        bias: bool,
        limit: float | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype, device=device)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype, device=device)
        self.gating = Gating(activation=activation, limit=limit)

    def prepare(self) -> None:
        """Make the product of gate and up."""
        self.product = self._product()

    def _product(self) -> Product:
        gate, up = self.gate_proj, self.up_proj
        return self.ops.gated(gate.weight, up.weight, self.gating, (gate.bias, up.bias))

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self.down_proj((self.product or self._product())(x))


class PlainMLP(Module):
    """``down(act(up(x)))``."""

    def __init__(
        self,
        size: int,
        inner: int,
        activation: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype, device=device)
        self.act = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self.down_proj(self.act(self.up_proj(x)))
