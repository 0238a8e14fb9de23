"""A decoder that carries several hidden states, of which each layer computes one and predicts the
others (Gemma 3n).

Owns alternating updates (AltUp, Baykal et al. 2023), low-rank residuals (LAuReL, Menghani et al.
2024) and MLPs whose gates are cut at a quantile. Operations are in Transformers' order. Module
names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.nn.decoder import Block, LayerCaches
from octavo.nn.linear import Linear
from octavo.nn.mlp import MLP
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.per_layer import Device, PerLayerBlock, PerLayerDecoder, PerLayerTrunk
from octavo.nn.step import Step
from octavo.spec.kind import LayerSpec, ModelSpec
from octavo.spec.per_layer import AltUpOptions


class SparseMLP(MLP):
    """``MLP`` whose gate lets through only what exceeds its token's mean by ``cut`` standard
    deviations.
    """

    def __init__(
        self, options: AltUpOptions, layer: int, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(
            options.hidden_size,
            options.inner_sizes[layer],
            options.activation,
            bias=options.mlp_bias,
            dtype=dtype,
            device=device,
        )
        quantile = torch.tensor(options.sparsity[layer], dtype=torch.float32, device="cpu")
        self.cut = float(torch.distributions.Normal(0.0, 1.0).icdf(quantile))

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        gate = self.gate_proj(x)
        deviation = gate.std(dim=-1, keepdim=True, unbiased=False)
        cut = torch.tensor(self.cut, dtype=gate.dtype, device=gate.device)
        kept = torch.relu(gate - (gate.mean(dim=-1, keepdim=True) + deviation * cut))
        return self.down_proj(self.gating.mix(kept, self.up_proj(x)))


class Laurel(Module):
    """A low-rank map beside the residual."""

    def __init__(self, options: AltUpOptions, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        size, rank = options.hidden_size, options.laurel_rank
        self.linear_left = Linear(size, rank, bias=False, dtype=dtype, device=device)
        self.linear_right = Linear(rank, size, bias=False, dtype=dtype, device=device)
        self.post_laurel_norm = Norm(
            size, options.norm_eps, options.norm, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class AltUp(Module):
    """Predicts all streams ahead of a layer, and corrects them by what the layer made of the active
    one.
    """

    def __init__(self, options: AltUpOptions, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.active, size, streams = options.active, options.hidden_size, options.streams
        self.correct_output_scale = nn.Parameter(
            torch.zeros(size, dtype=dtype, device=device), requires_grad=False
        )
        self.correction_coefs = Linear(streams, streams, bias=False, dtype=dtype, device=device)
        self.prediction_coefs = Linear(streams, streams**2, bias=False, dtype=dtype, device=device)
        self.modality_router = Linear(size, streams, bias=False, dtype=dtype, device=device)
        self.router_norm = Norm(size, options.norm_eps, options.norm, dtype=dtype, device=device)

    def _route(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, streams], between -1 and 1."""
        return torch.tanh(self.modality_router(self.router_norm(x) * (1 / x.shape[-1])).float()).to(
            x.dtype
        )

    def predict(self, states: Tensor) -> Tensor:
        """[streams, T, d] -> [streams, T, d]."""
        streams, tokens, _ = states.shape
        maps = self.prediction_coefs(self._route(states[self.active])).view(
            tokens, streams, streams
        )
        return (states.permute(1, 2, 0) @ maps.transpose(1, 2)).permute(2, 0, 1) + states

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """predicted [streams, T, d], computed [T, d] -> [streams, T, d]."""
        gains = self.correction_coefs(self._route(computed)) + 1.0
        return (computed - predicted[self.active]) * gains.T[:, :, None] + predicted


class AltUpBlock(PerLayerBlock):
    """One layer over all streams."""

    def __init__(
        self, layer: LayerSpec, options: AltUpOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(layer, options, dtype, device)
        self.correct_scale = options.correct_scale
        self.altup, self.laurel = AltUp(options, dtype, device), Laurel(options, dtype, device)
        if options.sparsity[layer.index] > 0:
            self.mlp = SparseMLP(options, layer.index, dtype, device)

    def forward(
        self, hidden: Tensor, step: Step, caches: LayerCaches, small: Tensor | None = None
    ) -> Tensor:
        """hidden [streams, T, d], small [T, small] -> [streams, T, d]."""
        assert small is not None, "every layer has an input of its own"
        predicted = self.altup.predict(hidden)
        active = predicted[self.altup.active]
        normed = self._norm("input", active)
        mixed = active + self._norm("post_attention", self._mix(normed, step=step, caches=caches))
        mixed = (mixed + self.laurel(normed)) / math.sqrt(2)
        fed = self._norm("post_feedforward", self.mlp(self._norm("pre_feedforward", mixed)))
        corrected = self.altup.correct(predicted, mixed + fed)
        first = corrected[self.altup.active]
        first = first * self.altup.correct_output_scale if self.correct_scale else first
        return torch.cat((corrected[:1], corrected[1:] + self.gated(first, small)))


class AltUpTrunk(PerLayerTrunk):
    """Everything below the head, with the maps between one hidden state and several."""

    block: ClassVar[type[Block]] = AltUpBlock

    def __init__(
        self, spec: ModelSpec, options: AltUpOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(spec, options, dtype, device)

        def maps() -> nn.ModuleList:
            size = options.hidden_size
            square = (
                Linear(size, size, bias=False, dtype=dtype, device=device)
                for _ in range(1, options.streams)
            )
            return nn.ModuleList(square)

        self.altup_projections, self.altup_unembed_projections = maps(), maps()

    def spread(self, hidden: Tensor) -> Tensor:
        """[T, d] -> [streams, T, d]: the first as it is, the others mapped and as large."""
        return torch.stack(
            [hidden, *(_as_large(each(hidden), hidden) for each in self.altup_projections)]
        )

    def gather(self, states: Tensor) -> Tensor:
        """[n, streams, d] -> [n, d]: the mean of the first and of the others mapped back and as
        large.
        """
        first, *others = states.unbind(1)
        back = zip(self.altup_unembed_projections, others, strict=True)
        return torch.stack([first, *(_as_large(each(other), first) for each, other in back)]).mean(
            dim=0
        )


def _as_large(x: Tensor, target: Tensor) -> Tensor:
    """x [..., d] with the root mean square of target [..., d]."""
    size = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True).clamp(min=1e-5))
    return x * target.pow(2).mean(dim=-1, keepdim=True) ** 0.5 / size


class AltUpDecoder(PerLayerDecoder):
    """Token ids in, hidden states of all streams out; ``head`` makes one of those that are
    wanted.
    """

    reads: ClassVar[type[AltUpOptions]] = AltUpOptions
    trunk: ClassVar[type[AltUpTrunk]] = AltUpTrunk
    model: AltUpTrunk

    def forward(self, step: Step, caches: LayerCaches) -> Tensor:
        """The step's tokens -> [T, streams, d], what ``head`` takes."""
        embedded = self.embed(step.token_ids)
        hidden = self.model.spread(embedded)
        for layer, small in zip(
            self.model.layers, self.model.small_inputs(step.token_ids, embedded), strict=True
        ):
            hidden = layer(hidden, step, caches, small)
        return hidden.transpose(0, 1)

    def head(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """Any rows [n, streams, d] -> logits [n, vocab]."""
        return super().head(self.model.gather(hidden), wide=wide)
