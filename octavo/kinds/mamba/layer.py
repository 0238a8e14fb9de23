"""The torch layer of Mamba, with the checkpoint's module names.

Owns projections, norms, skip and gate. The recurrence, and where states come from and go, is an
op's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kinds.mamba.spec import Mamba
from octavo.nn.conv import CausalConv
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.step import Caches, Step
from octavo.ops.states import State


class MambaLayer(Module):
    """A selective state space. Stream ``state``, fields conv and recurrent."""

    def __init__(self, kind: Mamba, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.kind, self.hidden_size = kind, kind.hidden_size
        inner, state = kind.inner_size, kind.state_size

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def wide(*shape: int) -> nn.Parameter:
            # Small, and exponentials of exponentials follow: kept in float32 whatever the model's
            # dtype.
            return nn.Parameter(
                torch.zeros(shape, dtype=torch.float32, device=device), requires_grad=False
            )

        self.in_proj = linear(kind.hidden_size, 2 * inner, kind.bias)
        self.conv1d = CausalConv(
            inner, kind.kernel, bias=kind.conv_bias, dtype=dtype, device=device
        )
        self.x_proj = linear(inner, kind.rank + 2 * state, False)
        self.dt_proj = linear(kind.rank, inner, True)
        self.out_proj = linear(inner, kind.hidden_size, kind.bias)
        self.A_log, self.D = wide(inner, state), wide(inner)
        if kind.norm == "scale":
            self.dt_layernorm = Norm(kind.rank, kind.norm_eps, "scale", dtype=dtype, device=device)
            self.b_layernorm = Norm(state, kind.norm_eps, "scale", dtype=dtype, device=device)
            self.c_layernorm = Norm(state, kind.norm_eps, "scale", dtype=dtype, device=device)

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the states that the cache's batch wants."""
        view = caches["state"]
        u, gate = self.in_proj(hidden).chunk(2, dim=-1)
        u = F.silu(self.conv1d(u, view, "conv"))
        state = State(view=view, name="recurrent")
        y = self.ops.selective_scan(u, *self.selected(u), state)
        return self.finished(y, u, gate)

    def selected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What channels u [T, I] choose: time steps [T, I]; A [I, N]; B and C [T, N]."""
        kind = self.kind
        dt, b, c = self.x_proj(u).split((kind.rank, kind.state_size, kind.state_size), dim=-1)
        if kind.norm == "scale":
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        elif kind.norm == "unit":
            dt, b, c = (self.ops.norm(x, None, kind.norm_eps, "unit") for x in (dt, b, c))
        dt = F.linear(dt, self.dt_proj.weight).to(self.A_log.dtype) + self.dt_proj.bias
        return F.softplus(dt), -self.A_log.exp(), b, c

    def finished(self, y: Tensor, u: Tensor, gate: Tensor) -> Tensor:
        """States read out, y, with the skip past the state, gated and projected: all [T, I] -> [T,
        d].
        """
        y = (y + u * self.D) * F.silu(gate.to(y.dtype))
        return self.out_proj(y.to(gate.dtype))
