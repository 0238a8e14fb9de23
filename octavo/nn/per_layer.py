"""A decoder whose layers have small inputs of their own, and whose last layers may read the caches
of earlier ones (Gemma 4).

Owns the tables and gates of those inputs, and which checkpoint tensors a layer that shares has no
use for. Module names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.nn.decoder import Block, Decoder, LayerCaches, Trunk
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.moe import Experts
from octavo.nn.norm import Norm
from octavo.nn.step import Step
from octavo.ops.activation import ACTIVATIONS
from octavo.spec.kind import LayerSpec, ModelSpec
from octavo.spec.moe import MoEOptions
from octavo.spec.per_layer import PerLayerOptions

Device = torch.device | str


class PerLayerBlock(Block):
    """A layer with a gate for its own input."""

    def __init__(
        self, layer: LayerSpec, options: PerLayerOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(
            layer,
            replace(options, intermediate_size=options.inner_sizes[layer.index]),
            dtype,
            device,
        )
        size, small = options.hidden_size, options.small_size
        self.act = ACTIVATIONS[options.activation]
        if small:
            self.per_layer_input_gate = Linear(size, small, bias=False, dtype=dtype, device=device)
            self.per_layer_projection = Linear(small, size, bias=False, dtype=dtype, device=device)
            self.post_per_layer_input_norm = Norm(
                size, options.norm_eps, options.norm, dtype=dtype, device=device
            )

    def gated(self, hidden: Tensor, small: Tensor) -> Tensor:
        """What the layer's own input [T, small] adds to hidden [T, d]: [T, d]."""
        mixed = self.per_layer_projection(self.act(self.per_layer_input_gate(hidden)) * small)
        return self.post_per_layer_input_norm(mixed)


class ScaledRouter(Module):
    """Softmax over the experts of a normed and scaled token; scores of those taken sum to 1 before
    each has its own factor.
    """

    def __init__(
        self, options: PerLayerOptions, moe: MoEOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        self.active, self.eps = moe.active, options.norm_eps
        self.proj = Linear(options.hidden_size, moe.experts, bias=False, dtype=dtype, device=device)
        self.scale = nn.Parameter(
            torch.ones(options.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.per_expert_scale = nn.Parameter(
            torch.ones(moe.experts, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, d] -> scores in x's dtype, and experts int64, both [T, active]."""
        normal = self.ops.norm(x, None, self.eps, "unit")
        logits = self.proj(normal * self.scale * x.shape[-1] ** -0.5)
        taken, chosen = torch.softmax(logits.float(), dim=-1).topk(self.active, dim=-1)
        taken = taken / taken.sum(dim=-1, keepdim=True)
        return (taken * self.per_expert_scale[chosen]).to(x.dtype), chosen


class ScaledBlock(PerLayerBlock):
    """Attention and MLP with norms on both sides, then the layer's own input, then a learnt factor
    of it all.

    Experts read what the MLP reads through norms of their own.
    """

    def __init__(
        self, layer: LayerSpec, options: PerLayerOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(layer, options, dtype, device)
        self.layer_scalar = nn.Parameter(
            torch.ones(1, dtype=dtype, device=device), requires_grad=False
        )
        self.experts: Experts | None = None
        if options.beside is not None:
            size, moe = options.hidden_size, options.beside
            self.router = ScaledRouter(options, moe, dtype, device)
            self.experts = Experts(size, options.activation, moe, dtype=dtype, device=device)
            norm = partial(Norm, size, options.norm_eps, options.norm, dtype=dtype, device=device)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()

    def forward(
        self, hidden: Tensor, step: Step, caches: LayerCaches, small: Tensor | None = None
    ) -> Tensor:
        """hidden [T, d], small [T, small] or None -> [T, d]."""
        hidden = hidden + self._norm(
            "post_attention", self._mix(self._norm("input", hidden), step=step, caches=caches)
        )
        hidden = hidden + self._norm("post_feedforward", self._feed(hidden))
        if small is not None:
            hidden = hidden + self.gated(hidden, small)
        return hidden * self.layer_scalar

    def _feed(self, hidden: Tensor) -> Tensor:
        """MLP, and experts where there are any, of [T, d]."""
        fed: Tensor = self.mlp(self._norm("pre_feedforward", hidden))
        if self.experts is None:
            return fed
        sparse = self.experts(self.pre_feedforward_layernorm_2(hidden), *self.router(hidden))
        return self.post_feedforward_layernorm_1(fed) + self.post_feedforward_layernorm_2(sparse)


class PerLayerTrunk(Trunk):
    """Everything below the head, with the table that all layers' inputs are read from."""

    block: ClassVar[type[Block]] = ScaledBlock

    def __init__(
        self, spec: ModelSpec, options: PerLayerOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(spec, options, dtype, device)
        self.options, small = options, options.small_size
        if small:
            width = len(spec.layers) * small
            self.embed_tokens_per_layer = nn.Embedding(
                options.small_vocab, width, dtype=dtype, device=device
            )
            self.per_layer_model_projection = Linear(
                options.hidden_size, width, bias=False, dtype=dtype, device=device
            )
            self.per_layer_projection_norm = Norm(
                small, options.norm_eps, options.norm, dtype=dtype, device=device
            )

    def small_inputs(self, token_ids: Tensor, embedded: Tensor) -> tuple[Tensor | None, ...]:
        """token_ids int64 [T] and their embeddings [T, d] -> for every layer [T, small], or None
        where layers have none.
        """
        options, layers = self.options, len(self.layers)
        if not options.small_size:
            return (None,) * layers
        known = torch.where(token_ids < options.small_vocab, token_ids, 0)
        table = self.embed_tokens_per_layer(known)
        # The table's own factor is always rounded, like that of the embeddings.
        table = table * torch.tensor(
            options.small_size**0.5, dtype=table.dtype, device=table.device
        )
        projected = self.per_layer_model_projection(embedded) * self._factor(
            options.hidden_size**-0.5, embedded
        )
        split = (-1, layers, options.small_size)
        projected = self.per_layer_projection_norm(projected.view(split))
        return ((projected + table.view(split)) * self._factor(2.0**-0.5, embedded)).unbind(1)

    def _factor(self, value: float, like: Tensor) -> Tensor | float:
        return (
            torch.tensor(value, dtype=like.dtype, device=like.device)
            if self.options.rounded_factors
            else value
        )


class PerLayerDecoder(Decoder):
    """Token ids in, hidden states out, as ``Decoder``."""

    reads: ClassVar[type[PerLayerOptions]] = PerLayerOptions
    trunk: ClassVar[type[PerLayerTrunk]] = PerLayerTrunk
    model: PerLayerTrunk

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: Device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self._unused = frozenset(
            f"model.layers.{layer.index}.{mixer}.{name}"
            for layer in spec.layers
            if layer.shares is not None
            for mixer, _ in layer.mixers
            for name in (
                "k_proj.weight",
                "k_proj.bias",
                "v_proj.weight",
                "v_proj.bias",
                "k_norm.weight",
            )
        )

    @property
    def unused(self) -> frozenset[str]:
        """What makes keys and values in layers that read another's."""
        return self._unused

    def forward(self, step: Step, caches: LayerCaches) -> Tensor:
        """The step's tokens -> [T, d], what ``head`` takes."""
        hidden = self.embed(step.token_ids)
        for layer, small in zip(
            self.model.layers, self.model.small_inputs(step.token_ids, hidden), strict=True
        ):
            hidden = layer(hidden, step, caches, small)
        return hidden
