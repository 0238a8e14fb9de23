"""The torch layer of Mamba-2, with the checkpoint's module names.

Owns projections, skip, gate and norm. The recurrence, and where states come from and go, is an
op's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kinds.mamba2.spec import Mamba2
from octavo.nn.conv import CausalConv
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.step import Caches, Step
from octavo.ops.states import State

FIELDS = ("conv_x", "conv_b", "conv_c")
"""Fields of the stream that one convolution runs over, by order of their channels."""


class GatedNorm(Module):
    """RMSNorm in groups of channels, of an output multiplied by its gate, or ahead of that."""

    def __init__(self, kind: Mamba2, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(kind.inner_size, dtype=dtype, device=device), requires_grad=False
        )
        self.groups, self.eps, self.before_gate = (
            kind.num_groups,
            kind.norm_eps,
            kind.norm_before_gate,
        )

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y and gate, ahead of its activation, [T, I] in float32 at least -> [T, I]."""
        if self.before_gate:
            return self._norm(y) * F.silu(gate)
        return self._norm(y * F.silu(gate))

    def _norm(self, y: Tensor) -> Tensor:
        grouped = y.unflatten(-1, (self.groups, -1))
        return self.weight * self.ops.norm(grouped, None, self.eps, "unit").flatten(-2)


class Mamba2Layer(Module):
    """A state space of heads. Stream ``state``, fields conv_x, conv_b, conv_c and recurrent."""

    def __init__(self, kind: Mamba2, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.kind, self.hidden_size = kind, kind.hidden_size
        inner, conv = kind.inner_size, kind.conv_size

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def wide() -> nn.Parameter:
            # Small, and exponentials of exponentials follow: kept in float32 whatever the model's
            # dtype.
            return nn.Parameter(
                torch.zeros(kind.num_heads, dtype=torch.float32, device=device), requires_grad=False
            )

        self.in_proj = linear(kind.hidden_size, inner + conv + kind.num_heads, kind.bias)
        self.conv1d = CausalConv(conv, kind.kernel, bias=kind.conv_bias, dtype=dtype, device=device)
        self.out_proj = linear(inner, kind.hidden_size, kind.out_bias)
        self.A_log, self.D, self.dt_bias = wide(), wide(), wide()
        self.norm = GatedNorm(kind, dtype, device) if kind.norm else None

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the states that the cache's batch wants."""
        view = caches["state"]
        gate, inputs, dt = self.projected(hidden)
        x, b, c = self.parted(F.silu(self.conv1d(inputs, view, *FIELDS)))
        state = State(view=view, name="recurrent")
        y = self.ops.ssd_scan(x, dt, -self.A_log.exp(), b, c, state)
        return self.finished(y, x, gate)

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, d] -> gate [T, I], inputs of the convolution [T, C], time steps [T, H]."""
        kind = self.kind
        made = self.in_proj(hidden if kind.in_scale == 1.0 else hidden * kind.in_scale)
        shared = kind.num_groups * kind.state_size
        parts = made.split(
            (kind.inner_size, kind.inner_size, shared, shared, kind.num_heads), dim=-1
        )
        scaled = [
            part if factor == 1.0 else part * factor
            for part, factor in zip(parts, kind.segment_scales, strict=True)
        ]
        gate, *inputs, dt = scaled
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias).clamp(*kind.dt_limit)
        return gate, torch.cat(inputs, dim=-1), dt

    def parted(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the convolution made [T, C] -> x [T, H, P], B and C [T, G, N]."""
        kind = self.kind
        shared = kind.num_groups * kind.state_size
        x, b, c = inputs.split((kind.inner_size, shared, shared), dim=-1)
        heads, groups = (kind.num_heads, kind.head_dim), (kind.num_groups, kind.state_size)
        return x.unflatten(-1, heads), b.unflatten(-1, groups), c.unflatten(-1, groups)

    def finished(self, y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """States read out, y [T, H, P], with the skip past the state, gated, normed and projected
        -> [T, d].
        """
        y = (y + x * self.D[:, None]).flatten(1)
        wide = gate.to(y.dtype)
        y = y * F.silu(wide) if self.norm is None else self.norm(y, wide)
        return self.out_proj(y.to(gate.dtype))
