"""A decoder of layers with a state, some of them behind one of a few transformer blocks that they
share (Zamba2).

Owns ``SharedDecoder``: which weights layers share, and the adapters that every use has of its own.
Layers that share weights still keep caches of their own. Weights that are shared belong to the
first layer that uses them. Knows layers by their kind's contract only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from octavo.nn.decoder import Decoder, LayerCaches, Trunk, build_mixer
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.step import Mixer, Step
from octavo.ops.activation import ACTIVATIONS
from octavo.spec.hybrid import SharedOptions
from octavo.spec.kind import LayerSpec, ModelSpec

Device = torch.device | str


class Adapted(Module):
    """A shared projection, with the low-rank term of its use number ``use`` where its uses have
    any.
    """

    def __init__(self, base: Linear, adapters: nn.ModuleDict, use: int) -> None:
        super().__init__()
        self.base, self.adapters, self.use = base, adapters, use

    def at(self, use: int) -> Adapted:
        """The same projection, weights and all, for another use."""
        return Adapted(self.base, self.adapters, use)

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        made = self.base(x)
        return made + self.adapters[str(self.use)](x) if self.adapters else made


def adapted(
    inputs: int, outputs: int, uses: range, rank: int, dtype: torch.dtype, device: Device
) -> Adapted:
    """A projection for the first of ``uses``, with adapters of ``rank`` for each of them, or none
    where that is 0.
    """

    def linear(first: int, last: int) -> Linear:
        return Linear(first, last, bias=False, dtype=dtype, device=device)

    terms = {
        str(use): nn.Sequential(linear(inputs, rank), linear(rank, outputs)) for use in uses if rank
    }
    return Adapted(linear(inputs, outputs), nn.ModuleDict(terms), uses.start)


class SharedMLP(Module):
    """A gated MLP with an adapter of gate and up together."""

    def __init__(
        self, options: SharedOptions, uses: range, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        size, inner = options.hidden_size, options.intermediate_size
        self.act = ACTIVATIONS[options.activation]
        self.gate_up_proj = adapted(size, 2 * inner, uses, options.adapter_rank, dtype, device)
        self.down_proj = Linear(inner, size, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class SharedTransformer(Module):
    """Attention over hidden state and embedding side by side, and an MLP; norms ahead of both, no
    residuals.

    The ``mixer`` is the kind's own layer, with projections of other sizes and uses.
    """

    def __init__(
        self,
        mixer: nn.Module,
        options: SharedOptions,
        uses: range,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__()
        size, rank = options.hidden_size, options.adapter_rank if options.attention_adapters else 0
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(mixer, name).out_features
            setattr(mixer, name, adapted(2 * size, outputs, uses, rank, dtype, device))
        self.self_attn = mixer
        self.feed_forward = SharedMLP(options, uses, dtype, device)
        self.input_layernorm = Norm(
            2 * size, options.norm_eps, options.norm, dtype=dtype, device=device
        )
        self.pre_ff_layernorm = Norm(
            size, options.norm_eps, options.norm, dtype=dtype, device=device
        )

    def adopt(self, owner: SharedTransformer, use: int) -> None:
        """Take the weights of ``owner``, for use number ``use``."""
        for mine, theirs in (
            (self.self_attn, owner.self_attn),
            (self.feed_forward, owner.feed_forward),
            (self, owner),
        ):
            for name, module in theirs.named_children():
                if isinstance(module, Adapted):
                    setattr(mine, name, module.at(use))
                elif isinstance(module, nn.Linear | Norm):
                    setattr(mine, name, module)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        step: Step,
        caches: LayerCaches,
        where: tuple[int, str],
    ) -> Tensor:
        """hidden and embedded [T, d] -> [T, d], with the caches of layer and mixer ``where``."""
        both = self.input_layernorm(torch.cat((hidden, embedded), dim=-1))
        mixed = cast(Mixer, self.self_attn)(both, step, caches[where])
        return cast(Tensor, self.feed_forward(self.pre_ff_layernorm(mixed)))


class SharingBlock(Module):
    """A layer with a state. Where it has a shared block ahead of it, what that makes is added to
    the layer's input only.
    """

    def __init__(
        self, layer: LayerSpec, options: SharedOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        size, self.index = options.hidden_size, layer.index
        *ahead, (self.mixer, kind) = layer.mixers
        self.add_module(self.mixer, build_mixer(kind, dtype, device))
        self.input_layernorm = Norm(
            size, options.norm_eps, options.norm, dtype=dtype, device=device
        )
        self.ahead = ahead[0][0] if ahead else None
        self.shared_transformer: SharedTransformer | None = None
        if ahead:
            self.linear = Linear(size, size, bias=False, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, step: Step, caches: LayerCaches, embedded: Tensor) -> Tensor:
        """hidden [T, d], and embedded, the embeddings [T, d] -> [T, d]."""
        given = hidden
        if self.shared_transformer is not None and self.ahead is not None:
            made = self.shared_transformer(hidden, embedded, step, caches, (self.index, self.ahead))
            given = hidden + self.linear(made)
        mixer = cast(Mixer, getattr(self, self.mixer))
        return hidden + mixer(self.input_layernorm(given), step, caches[self.index, self.mixer])


class SharedTrunk(Trunk):
    """Everything below the head."""

    block: ClassVar[type[nn.Module]] = SharingBlock

    def __init__(
        self, spec: ModelSpec, options: SharedOptions, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__(spec, options, dtype, device)
        sharing = [
            cast(SharingBlock, self.layers[layer.index])
            for layer in spec.layers
            if len(layer.mixers) > 1
        ]
        kinds = [layer.mixers[0][1] for layer in spec.layers if len(layer.mixers) > 1]
        for use, (block, kind) in enumerate(zip(sharing, kinds, strict=True)):
            uses = range(use, len(sharing), options.blocks)
            made = SharedTransformer(build_mixer(kind, dtype, device), options, uses, dtype, device)
            if use >= options.blocks:
                made.adopt(
                    cast(SharedTransformer, sharing[use % options.blocks].shared_transformer), use
                )
            block.shared_transformer = made


class SharedDecoder(Decoder):
    """Token ids in, hidden states out, as ``Decoder``."""

    reads: ClassVar[type[SharedOptions]] = SharedOptions
    trunk: ClassVar[type[SharedTrunk]] = SharedTrunk

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: Device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        owners = {id(weight): name for name, weight in self.named_parameters()}
        everything = self.named_parameters(remove_duplicate=False)
        self._repeated = {
            name: owners[id(weight)] for name, weight in everything if owners[id(weight)] != name
        }

    @property
    def tied(self) -> Mapping[str, str]:
        """As ``Decoder``; and shared weights under the names of layers that are not the first to
        use them.
        """
        return {**super().tied, **self._repeated}

    def forward(self, step: Step, caches: LayerCaches) -> Tensor:
        """The step's tokens -> [T, d], what ``head`` takes."""
        hidden = embedded = self.embed(step.token_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, step, caches, embedded)
        return hidden
