"""The MLP of a layer, with a gate (Shazeer 2020) or without. Owns both and the activations they
know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.linear import Linear, Ready

Gate = Callable[[Tensor], Tensor]


def relu2(x: Tensor) -> Tensor:
    """``max(x, 0) ** 2`` (So et al. 2021)."""
    return F.relu(x).square()


GATES: Mapping[str, Gate] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "relu2": relu2,
    }
)
"""Activations by Transformers' name."""


def limited(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The gate at most ``limit``, up within it on both sides."""
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, with ``limited`` gate and up where there is a limit."""

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
        self.gate, self.limit, self._ready = GATES[activation], limit, Ready(activation)

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        if self.limit is None and self.gate_proj.bias is None:
            matrices = self._ready.of((self.gate_proj.weight,), up=self.up_proj.weight)
            if matrices.takes(x):
                return self.down_proj(matrices(x))
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is not None:
            gate, up = limited(gate, up, self.limit)
        return self.down_proj(self.gate(gate) * up)


class PlainMLP(nn.Module):
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
        self.act = GATES[activation]

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self.down_proj(self.act(self.up_proj(x)))
