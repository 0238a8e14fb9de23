"""The activations of MLPs, by the names that Transformers gives them, and how a gate and what it
lets through become one.

Owns ``ACTIVATIONS`` and ``Gating``: data that every backend takes, with what it says in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def relu2(x: Tensor) -> Tensor:
    """``max(x, 0) ** 2`` (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "relu2": relu2,
    }
)
"""Activations by Transformers' name."""


@dataclass(frozen=True, kw_only=True)
class Gating:
    """``act(gate) * up``, elementwise.

    activation: a name of ``ACTIVATIONS``. limit: the gate is at most and up within it, ahead of the
        activation. clamp: (limit, alpha) of gpt-oss, whose own formula it is: ``(up + 1) * gate *
        sigmoid(alpha * gate)`` with gate and up limited.
    """

    activation: str
    limit: float | None = None
    clamp: tuple[float, float] | None = None

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., n] -> [..., n]."""
        limit = self.limit if self.clamp is None else self.clamp[0]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        if self.clamp is None:
            return ACTIVATIONS[self.activation](gate) * up
        return (up + 1) * (gate * torch.sigmoid(gate * self.clamp[1]))
