"""A decoder that carries several residual streams, mixed into one ahead of every mixer and MLP and
spread out behind it.

Owns manifold-constrained hyper-connections (mHC, Xie et al. 2026) as DeepSeek-V4 has them: their
maps depend on the token's own streams only, so that no cache knows of them. Maps are computed in
float32. Module names are those of Transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.nn.decoder import Block, Decoder, LayerCaches, Trunk
from octavo.nn.module import Module
from octavo.nn.step import Step
from octavo.ops.table import Product
from octavo.spec.hyper import HyperOptions
from octavo.spec.kind import LayerSpec, ModelSpec

Device = torch.device | str


def _weight(*shape: int, device: Device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)


class _Features(Module):
    """A projection of all streams of a token, normed together, by the weight that ``name``
    names.
    """

    product: Product | None = None
    name: ClassVar[str]
    options: HyperOptions

    def prepare(self) -> None:
        """Make the product."""
        self.product = self.ops.project(getattr(self, self.name), None)

    def features(self, streams: Tensor) -> Tensor:
        """[T, n, d] -> [T, outputs]."""
        weight = getattr(self, self.name)
        normed = self.ops.norm(
            streams.flatten(1).to(weight.dtype), None, self.options.norm_eps, "unit"
        )
        return (self.product or self.ops.project(weight, None))(normed)


class HyperConnection(_Features):
    """The maps around one mixer or MLP: streams to its input, its output to streams, streams to
    streams.
    """

    name = "fn"

    def __init__(self, options: HyperOptions, device: Device) -> None:
        super().__init__()
        self.options, count = options, options.streams
        self.fn = _weight((2 + count) * count, count * options.hidden_size, device=device)
        self.base = _weight((2 + count) * count, device=device)
        self.scale = _weight(3, device=device)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, n, d] -> input [T, d]; gains of the output [T, n, 1] and the map of the streams [T,
        n, n], in streams' dtype.
        """
        count, floor, dtype = self.options.streams, self.options.floor, streams.dtype
        cuts = (count, count, count * count)
        parts = zip(
            self.features(streams).split(cuts, 1),
            self.scale,
            self.base.split(cuts),
            strict=True,
        )
        taken, given, mixed = (part * scale + base for part, scale, base in parts)
        taken = torch.sigmoid(taken) + floor
        joined = (taken[..., None] * streams).sum(dim=1).to(dtype)
        carried = self._balanced(torch.softmax(mixed.unflatten(1, (count, count)), dim=-1) + floor)
        return (
            joined,
            (2 * torch.sigmoid(given)).to(dtype)[..., None],
            carried.to(dtype).transpose(1, 2),
        )

    def _balanced(self, maps: Tensor) -> Tensor:
        """[T, n, n] with rows and columns that sum to about 1 (Sinkhorn and Knopp 1967)."""
        maps = maps / (maps.sum(dim=1, keepdim=True) + self.options.floor)
        for _ in range(self.options.rounds - 1):
            maps = maps / (maps.sum(dim=2, keepdim=True) + self.options.floor)
            maps = maps / (maps.sum(dim=1, keepdim=True) + self.options.floor)
        return maps


class HyperHead(_Features):
    """One hidden state of all streams, behind the last layer."""

    name = "hc_fn"

    def __init__(self, options: HyperOptions, device: Device) -> None:
        super().__init__()
        self.options, count = options, options.streams
        self.hc_fn = _weight(count, count * options.hidden_size, device=device)
        self.hc_base, self.hc_scale = _weight(count, device=device), _weight(1, device=device)

    def forward(self, streams: Tensor) -> Tensor:
        """[n, streams, d] -> [n, d]."""
        mixed = self.features(streams) * self.hc_scale + self.hc_base
        return (
            ((torch.sigmoid(mixed) + self.options.floor)[..., None] * streams)
            .sum(dim=1)
            .to(streams.dtype)
        )


class HyperBlock(Block):
    """One layer between hyper-connections."""

    def __init__(
        self, layer: LayerSpec, options: HyperOptions, dtype: torch.dtype, device: Device
    ) -> None:
        hashed = options.hashed
        moe = hashed if hashed is not None and layer.index in hashed.layers else options.moe
        super().__init__(layer, replace(options, moe=moe), dtype, device)
        self.attn_hc, self.ffn_hc = (
            HyperConnection(options, device),
            HyperConnection(options, device),
        )

    def forward(self, hidden: Tensor, step: Step, caches: LayerCaches) -> Tensor:
        """hidden [T, streams, d] -> [T, streams, d]."""
        joined, gains, carried = self.attn_hc(hidden)
        mixed = self._mix(self._norm("input", joined), step=step, caches=caches)
        hidden = gains * mixed[:, None] + carried @ hidden
        joined, gains, carried = self.ffn_hc(hidden)
        fed = self.mlp(self._norm("post_attention", joined), step.token_ids)
        return gains * fed[:, None] + carried @ hidden


class HyperTrunk(Trunk):
    """Everything below the head, which takes one stream."""

    block: ClassVar[type[Block]] = HyperBlock

    def __init__(
        self, spec: ModelSpec, options: HyperOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(spec, options, dtype, device)
        self.hc_head = HyperHead(options, device)


class HyperDecoder(Decoder):
    """Token ids in, hidden states of all streams out; ``head`` makes one of those that are
    wanted.
    """

    reads: ClassVar[type[HyperOptions]] = HyperOptions
    trunk: ClassVar[type[HyperTrunk]] = HyperTrunk
    options: HyperOptions
    model: HyperTrunk

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, streams, d], all alike."""
        return super().embed(token_ids)[:, None].expand(-1, self.options.streams, -1)

    def head(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """Any rows [n, streams, d] -> logits [n, vocab]."""
        return super().head(self.model.hc_head(hidden), wide=wide)
