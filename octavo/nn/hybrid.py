"""Decoders whose layers are one thing each, or several mixers side by side.

Owns ``SoloDecoder`` (Mamba, Mamba-2, Nemotron-H) and ``HybridDecoder`` (Granite 4, Falcon-H1), as
their options describe them. Knows layers by their kind's contract only. Module names are those of
Hugging Face checkpoints where families agree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from octavo.nn.decoder import Block, Decoder, LayerCaches, Trunk, build_mixer
from octavo.nn.mlp import MLP, PlainMLP
from octavo.nn.module import Module
from octavo.nn.moe import MoE
from octavo.nn.norm import Norm
from octavo.nn.step import Mixer, Step
from octavo.spec.hybrid import HybridOptions, SoloOptions
from octavo.spec.kind import LayerSpec, ModelSpec

Device = torch.device | str


class SoloBlock(Module):
    """One norm, and one mixer, MLP or set of experts, with its residual."""

    def __init__(
        self, layer: LayerSpec, options: SoloOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        assert len(layer.mixers) <= 1, "such a layer mixes tokens once at most"
        self.index, self.dtype, self.mixes = layer.index, dtype, bool(layer.mixers)
        self.norm = Norm(
            options.hidden_size, options.norm_eps, options.norm, dtype=dtype, device=device
        )
        self.mixer: nn.Module
        if layer.mixers:
            ((self.name, kind),) = layer.mixers
            self.mixer = build_mixer(kind, dtype, device)
        elif options.moe is not None and layer.index in options.moe.layers:
            self.mixer = MoE(
                options.hidden_size, options.activation, options.moe, dtype=dtype, device=device
            )
        else:
            inner, bias = options.intermediate_size, options.mlp_bias
            self.mixer = PlainMLP(
                options.hidden_size,
                inner,
                options.activation,
                bias=bias,
                dtype=dtype,
                device=device,
            )

    def forward(self, hidden: Tensor, step: Step, caches: LayerCaches) -> Tensor:
        """hidden [T, d] -> [T, d], in the residual's dtype."""
        normed = self.norm(hidden.to(self.dtype))
        if not self.mixes:
            return hidden + self.mixer(normed)
        return hidden + cast(Mixer, self.mixer)(normed, step, caches[self.index, self.name])


class NarrowingNorm(Norm):
    """A norm whose output has the dtype of its weight, whatever its input has."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return super().forward(x).to(self.weight.dtype)


class SoloTrunk(Trunk):
    """Everything below the head."""

    block: ClassVar[type[nn.Module]] = SoloBlock

    def __init__(
        self, spec: ModelSpec, options: SoloOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(spec, options, dtype, device)
        self.norm = NarrowingNorm(
            options.hidden_size, options.norm_eps, options.norm, dtype=dtype, device=device
        )


class SoloDecoder(Decoder):
    """Token ids in, hidden states out, as ``Decoder``."""

    reads: ClassVar[type[SoloOptions]] = SoloOptions
    trunk: ClassVar[type[SoloTrunk]] = SoloTrunk
    options: SoloOptions

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, d], in the residual's dtype."""
        hidden = super().embed(token_ids)
        return hidden.float() if self.options.wide_residual else hidden


class ScaledMLP(MLP):
    """``down(act(gate(x) * gate_scale) * up(x)) * down_scale``."""

    def __init__(self, options: HybridOptions, dtype: torch.dtype, device: Device) -> None:
        inner, bias = options.intermediate_size, options.mlp_bias
        super().__init__(
            options.hidden_size, inner, options.activation, bias=bias, dtype=dtype, device=device
        )
        self.scales = options.gate_scale, options.down_scale

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        first, last = self.scales
        gate, up = self.gate_proj(x) * first, self.up_proj(x)
        return self.down_proj(self.gating.mix(gate, up)) * last


class SharedExpert(Module):
    """What is left of a layer's experts where there is the shared one only; named as if there were
    others.
    """

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return cast(Tensor, self.shared_experts(x))


class HybridBlock(Block):
    """Mixers that read the same input and are added up, then an MLP or experts; norms ahead of
    both.
    """

    def __init__(
        self, layer: LayerSpec, options: HybridOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(replace(layer, mixers=layer.mixers[:1]), options, dtype, device)
        self.options, self.mixers = options, tuple(name for name, _ in layer.mixers)
        for name, kind in layer.mixers[1:]:
            self.add_module(name, build_mixer(kind, dtype, device))
        if (options.gate_scale, options.down_scale) != (1.0, 1.0):
            self.mlp = ScaledMLP(options, dtype, device)
        if options.shared_only:
            self.mlp = SharedExpert(self.mlp)

    def forward(self, hidden: Tensor, step: Step, caches: LayerCaches) -> Tensor:
        """hidden [T, d] -> [T, d]."""
        scale = self.options.residual_scale
        hidden = hidden + self._mix(self._norm("input", hidden), step=step, caches=caches) * scale
        return hidden + self.mlp(self._norm("post_attention", hidden)) * scale

    def _mix(self, x: Tensor, *, step: Step, caches: LayerCaches) -> Tensor:
        mixed = [self._mixed(name, x, step, caches) for name in self.mixers]
        return reduce(torch.add, mixed)

    def _mixed(self, name: str, x: Tensor, step: Step, caches: LayerCaches) -> Tensor:
        before, behind = (
            self.options.in_scales.get(name, 1.0),
            self.options.out_scales.get(name, 1.0),
        )
        made = cast(Mixer, getattr(self, name))(
            x if before == 1.0 else x * before, step, caches[self.index, name]
        )
        return made if behind == 1.0 else made * behind


class HybridTrunk(Trunk):
    """Everything below the head."""

    block: ClassVar[type[nn.Module]] = HybridBlock


class HybridDecoder(Decoder):
    """Token ids in, hidden states out, as ``Decoder``."""

    reads: ClassVar[type[HybridOptions]] = HybridOptions
    trunk: ClassVar[type[HybridTrunk]] = HybridTrunk
