"""What layers with a delta rule share: one convolution over q, k and v, unit keys, a matrix per
head, a gated norm.

Owns ``DeltaRule``, from which the kinds derive, and the dense oracle of such layers. How decays,
strengths and gates come from the hidden state is the kinds'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.nn.conv import CausalConv
from octavo.nn.module import Module
from octavo.nn.step import Caches, Step
from octavo.ops.activation import ACTIVATIONS
from octavo.ops.oracles import recurrent
from octavo.ops.ragged import Ragged, work_dtype
from octavo.ops.states import State

FIELDS = ("conv_q", "conv_k", "conv_v")
UNIT_EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 where it is."""
    return x.to(work_dtype(x))


class GatedNorm(Module):
    """RMSNorm times an activated gate, rounded last."""

    def __init__(
        self,
        size: int,
        eps: float,
        activation: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(size, dtype=dtype, device=device), requires_grad=False
        )
        self.eps, self.activation = eps, activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [..., size] in float32 at least, gate [..., size] -> [..., size] in the gate's
        dtype.
        """
        normal = self.ops.norm(x, None, self.eps, "unit")
        return (normal * wide(self.weight) * self.activation(wide(gate))).to(gate.dtype)


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of a layer: ``value_heads`` matrices of ``key_dim`` rows; neighbours share one of
    ``key_heads`` keys.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaInputs:
    """What a step's tokens bring: q, k and v ahead of the convolution [T, channels], log_decay [T,
    H] or [T, H, Dk] <= 0, beta [T, H], gate [T, H, Dv].
    """

    qkv: Tensor
    log_decay: Tensor
    beta: Tensor
    gate: Tensor


class DeltaRule(Module):
    """The delta rule between a kind's ``inputs`` and its ``output``. Stream ``state``: ``FIELDS``
    and recurrent.
    """

    def __init__(
        self,
        shape: DeltaShape,
        *,
        hidden_size: int,
        kernel: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shape, self.hidden_size, self.activation = shape, hidden_size, ACTIVATIONS[activation]
        self.conv1d = CausalConv(sum(shape.parts), kernel, dtype=dtype, device=device)

    def inputs(self, hidden: Tensor) -> DeltaInputs:
        """Of hidden [T, d]."""
        raise NotImplementedError

    def output(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """mixed [T, H, Dv] in float32 at least, gate [T, H, Dv] -> [T, d]."""
        raise NotImplementedError

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [T, C] -> q [T, Hk, Dk], scaled, k [T, Hk, Dk], both of unit length, v
        [T, H, Dv].
        """
        shape = self.shape
        q, k, v = wide(self.activation(mixed)).split(shape.parts, dim=-1)
        q, k = (x.view(-1, shape.key_heads, shape.key_dim) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS) for x in (q, k))
        return q * shape.key_dim**-0.5, k, v.view(-1, shape.value_heads, shape.value_dim)

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the states that the cache's batch asks for."""
        view, made = caches["state"], self.inputs(hidden)
        mixed = self.conv1d(made.qkv, view, *FIELDS)
        state = State(view=view, name="recurrent")
        out = self.ops.delta_scan(*self.heads(mixed), made.log_decay, made.beta, state)
        return self.output(out, made.gate)


def dense_delta(layer: DeltaRule, hidden: Tensor) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], token by token from zero states: the
    kinds' oracle.
    """
    shape, made = layer.shape, layer.inputs(hidden)
    whole = Ragged(starts=(0, hidden.shape[0]), emits=((),))
    past = hidden.new_zeros(1, sum(shape.parts), layer.conv1d.taps.shape[1] - 1)
    mixed, _ = recurrent.causal_conv(made.qkv, past, layer.conv1d.taps, None, whole)
    state = hidden.new_zeros(1, shape.value_heads, shape.key_dim, shape.value_dim)
    out, _ = recurrent.gated_delta(*layer.heads(mixed), made.log_decay, made.beta, state, whole)
    return layer.output(out, made.gate)
