"""The torch layer of a gated delta net: one decay per value head, with the checkpoints' module
names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kinds.gated_delta_net.spec import GatedDeltaNet
from octavo.nn.delta import DeltaInputs, DeltaRule, DeltaShape, GatedNorm, wide
from octavo.nn.linear import Linear


class GatedDeltaNetLayer(DeltaRule):
    """Projections, gates and output around the delta rule."""

    def __init__(self, kind: GatedDeltaNet, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = DeltaShape(
            key_heads=kind.key_heads,
            value_heads=kind.value_heads,
            key_dim=kind.key_dim,
            value_dim=kind.value_dim,
        )
        super().__init__(
            shape,
            hidden_size=kind.hidden_size,
            kernel=kind.kernel,
            activation=kind.activation,
            dtype=dtype,
            device=device,
        )
        self.kind = kind
        channels, values, heads = sum(shape.parts), shape.parts[2], kind.value_heads

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        if kind.packed:
            self.in_proj_qkvz = linear(kind.hidden_size, channels + values)
            self.in_proj_ba = linear(kind.hidden_size, 2 * heads)
        else:
            self.in_proj_qkv = linear(kind.hidden_size, channels)
            self.in_proj_z = linear(kind.hidden_size, values)
            self.in_proj_b = linear(kind.hidden_size, heads)
            self.in_proj_a = linear(kind.hidden_size, heads)
        ones = torch.ones(heads, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.dt_bias = nn.Parameter(ones, requires_grad=False)
        self.A_log = nn.Parameter(torch.zeros_like(ones), requires_grad=False)
        self.norm = GatedNorm(kind.value_dim, kind.norm_eps, F.silu, dtype=dtype, device=device)
        self.out_proj = linear(values, kind.hidden_size)

    def inputs(self, hidden: Tensor) -> DeltaInputs:
        """See the base."""
        if self.kind.packed:
            qkv, z, b, a = self._unpacked(hidden)
        else:
            qkv, z, b, a = (
                each(hidden)
                for each in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            )
        beta = b.sigmoid() * 2 if self.kind.doubled else b.sigmoid()
        log_decay = -self.A_log.exp() * F.softplus(wide(a) + self.dt_bias)
        gate = z.view(-1, self.kind.value_heads, self.kind.value_dim)
        return DeltaInputs(qkv=qkv, log_decay=log_decay, beta=beta, gate=gate)

    def _unpacked(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [T, C], z [T, H Dv], b and a [T, H] of projections whose rows lie key head
        after key head.
        """
        kind = self.kind
        share = kind.value_heads // kind.key_heads
        values = share * kind.value_dim
        heads = self.in_proj_qkvz(hidden).view(-1, kind.key_heads, 2 * kind.key_dim + 2 * values)
        q, k, v, z = heads.split((kind.key_dim, kind.key_dim, values, values), dim=-1)
        b, a = self.in_proj_ba(hidden).view(-1, kind.key_heads, 2 * share).chunk(2, dim=-1)
        return (
            torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1),
            z.flatten(1),
            b.flatten(1),
            a.flatten(1),
        )

    def output(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """See the base."""
        return self.out_proj(self.norm(mixed, gate).flatten(1))
