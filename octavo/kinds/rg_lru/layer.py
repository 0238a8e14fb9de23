"""The torch layer of a gated linear recurrence (Griffin), with the module names of RecurrentGemma's
checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kinds.rg_lru.spec import RealGatedRecurrent
from octavo.nn.conv import CausalConv
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.step import Caches, Step
from octavo.ops.activation import ACTIVATIONS
from octavo.ops.ragged import work_dtype
from octavo.ops.states import State

SHARPNESS = 8.0
"""The constant c of De et al. 2024, equation 4."""


class RecurrentGates(Module):
    """Decays and inputs of the recurrence; both gates are block-diagonal, one block per head."""

    def __init__(
        self, width: int, heads: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        block = width // heads
        self.recurrent_param = weight(width)
        self.input_gate_weight, self.input_gate_bias = (
            weight(heads, block, block),
            weight(heads, block),
        )
        self.recurrent_gate_weight, self.recurrent_gate_bias = (
            weight(heads, block, block),
            weight(heads, block),
        )

    def forward(self, u: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """u [T, width], first bool [T, 1], true at position 0 -> decay and input of ``h = decay h +
        input`` [T, width].

        Both in float32 at least: in bfloat16 a decay near 1 would be 1. A first token forgets all
        and is not scaled.
        """
        blocks = u.unflatten(-1, self.input_gate_bias.shape).transpose(0, 1)
        gates = []
        for weight, bias in (
            (self.input_gate_weight, self.input_gate_bias),
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
        ):
            made = torch.baddbmm(bias[:, None], blocks, weight).transpose(0, 1).flatten(1)
            gates.append(made.to(work_dtype(made)).sigmoid())
        log_decay = -SHARPNESS * gates[1] * F.softplus(self.recurrent_param.to(gates[1].dtype))
        scale = torch.sqrt(1 - torch.exp(2 * log_decay)).masked_fill(first, 1.0)
        return log_decay.exp().masked_fill(first, 0.0), u * gates[0] * scale


class RealGatedRecurrentLayer(Module):
    """A convolution and the recurrence behind it, beside a gate. Stream ``state``, fields conv and
    recurrent.
    """

    def __init__(
        self, kind: RealGatedRecurrent, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.kind, self.hidden_size, self.activation = (
            kind,
            kind.hidden_size,
            ACTIVATIONS[kind.activation],
        )

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, dtype=dtype, device=device)

        self.linear_y, self.linear_x = (
            linear(kind.hidden_size, kind.width),
            linear(kind.hidden_size, kind.width),
        )
        self.linear_out = linear(kind.width, kind.hidden_size)
        self.conv_1d = CausalConv(kind.width, kind.kernel, bias=True, dtype=dtype, device=device)
        self.rg_lru = RecurrentGates(kind.width, kind.num_heads, dtype, device)

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the states that the cache's batch asks for."""
        view = caches["state"]
        u = self.conv_1d(self.linear_x(hidden), view, "conv")
        decay, push = self.rg_lru(u, step.positions[:, None] == 0)
        mixed = self.ops.linear_scan(decay, push, State(view=view, name="recurrent"))
        return self.linear_out(mixed.to(hidden.dtype) * self.activation(self.linear_y(hidden)))
