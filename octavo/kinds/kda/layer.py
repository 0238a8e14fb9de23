"""The torch layer of Kimi delta attention: a decay for every channel of a key, with the
checkpoints' module names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kinds.kda.spec import KimiDelta
from octavo.nn.delta import DeltaInputs, DeltaRule, DeltaShape, GatedNorm, wide
from octavo.nn.linear import Linear


class KimiDeltaLayer(DeltaRule):
    """Projections, low-rank gates and output around the delta rule."""

    def __init__(self, kind: KimiDelta, dtype: torch.dtype, device: torch.device | str) -> None:
        heads, dim, size = kind.num_heads, kind.head_dim, kind.hidden_size
        shape = DeltaShape(key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim)
        super().__init__(
            shape,
            hidden_size=size,
            kernel=kind.kernel,
            activation=kind.activation,
            dtype=dtype,
            device=device,
        )
        self.kind = kind

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        inner = heads * dim
        self.q_proj, self.k_proj, self.v_proj = (
            linear(size, inner),
            linear(size, inner),
            linear(size, inner),
        )
        self.f_a_proj, self.f_b_proj = linear(size, dim), linear(dim, inner)
        self.g_a_proj, self.g_b_proj = linear(size, dim), linear(dim, inner)
        self.b_proj, self.o_proj = linear(size, heads), linear(inner, size)
        ones = torch.ones(inner, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.dt_bias = nn.Parameter(ones, requires_grad=False)
        self.A_log = nn.Parameter(ones.new_zeros(1, 1, heads, 1), requires_grad=False)
        self.o_norm = GatedNorm(dim, kind.norm_eps, torch.sigmoid, dtype=dtype, device=device)

    def inputs(self, hidden: Tensor) -> DeltaInputs:
        """See the base."""
        split = (-1, self.kind.num_heads, self.kind.head_dim)
        speed = F.softplus(wide(self.f_b_proj(self.f_a_proj(hidden))) + self.dt_bias).view(split)
        return DeltaInputs(
            qkv=torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1),
            log_decay=-self.A_log[0].exp() * speed,
            beta=self.b_proj(hidden).sigmoid(),
            gate=self.g_b_proj(self.g_a_proj(hidden)).view(split),
        )

    def output(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """See the base."""
        return self.o_proj(self.o_norm(mixed, gate).flatten(1))
