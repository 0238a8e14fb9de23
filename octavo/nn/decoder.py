"""A decoder-only transformer of any kinds of layers: embedding, blocks, norm, head.

Owns ``Decoder``, which a family configures by ``DecoderOptions``. Knows layers by their kind's
contract only. Module names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from octavo.base import UnsupportedError
from octavo.nn.linear import Linear
from octavo.nn.mlp import MLP
from octavo.nn.module import Module
from octavo.nn.moe import MoE
from octavo.nn.norm import Norm
from octavo.nn.step import Caches, Mixer, Step
from octavo.ops.table import Product
from octavo.spec.decoder import DecoderOptions, Placement
from octavo.spec.kind import Kind, LayerSpec, ModelSpec

LayerCaches = Mapping[tuple[int, str], Caches]
"""Streams of every (layer, mixer)."""


def resolve(path: str | None) -> Any:
    """The object that ``module:name`` names. Raises UnsupportedError for None: what can be planned
    for but not run.
    """
    if path is None:
        raise UnsupportedError("the model can be planned but not run yet")
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build_mixer(kind: Kind, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """The torch layer of a kind."""
    if kind.layer is None:
        raise UnsupportedError(f"kind {kind.name!r} can be planned but not run yet")
    return cast(nn.Module, resolve(kind.layer)(kind, dtype, device))


NORMS: Mapping[Placement, tuple[str, ...]] = MappingProxyType(
    {
        "pre": ("input", "post_attention"),
        "post": ("post_attention", "post_feedforward"),
        "sandwich": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
        "parallel": ("input",),
    }
)
"""The norms of a layer; checkpoints write ``_layernorm`` behind."""


class Block(Module):
    """One layer: mixer and MLP with their residuals, and norms where ``DecoderOptions.placement``
    says.
    """

    def __init__(
        self,
        layer: LayerSpec,
        options: DecoderOptions,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert len(layer.mixers) == 1, "a plain decoder layer mixes tokens once"
        self.index: int = layer.index
        self.placement: Placement = (
            "pre" if layer.index in options.pre_layers else options.placement
        )
        self.mixer, kind = layer.mixers[0]
        self.add_module(self.mixer, build_mixer(kind, dtype, device))
        size, activation = options.hidden_size, options.activation
        self.mlp: nn.Module
        if options.moe is not None and layer.index in options.moe.layers:
            self.mlp = MoE(size, activation, options.moe, dtype=dtype, device=device)
        else:
            inner, bias = options.intermediate_size, options.mlp_bias
            self.mlp = MLP(size, inner, activation, bias=bias, dtype=dtype, device=device)
        for name in NORMS[self.placement]:
            self.add_module(
                f"{name}_layernorm",
                Norm(
                    options.hidden_size, options.norm_eps, options.norm, dtype=dtype, device=device
                ),
            )

    def forward(self, hidden: Tensor, step: Step, caches: LayerCaches) -> Tensor:
        """hidden [T, d] -> [T, d]."""
        mix, mlp = partial(self._mix, step=step, caches=caches), self.mlp
        if self.placement == "parallel":
            normed = self._norm("input", hidden)
            return hidden + mix(normed) + mlp(normed)
        if self.placement == "post":
            hidden = hidden + self._norm("post_attention", mix(hidden))
            return hidden + self._norm("post_feedforward", mlp(hidden))
        mixed = mix(self._norm("input", hidden))
        if self.placement == "pre":
            hidden = hidden + mixed
            return hidden + mlp(self._norm("post_attention", hidden))
        hidden = hidden + self._norm("post_attention", mixed)
        return hidden + self._norm("post_feedforward", mlp(self._norm("pre_feedforward", hidden)))

    def _mix(self, x: Tensor, *, step: Step, caches: LayerCaches) -> Tensor:
        return cast(Mixer, getattr(self, self.mixer))(x, step, caches[self.index, self.mixer])

    def _norm(self, where: str, x: Tensor) -> Tensor:
        return cast(Tensor, getattr(self, f"{where}_layernorm")(x))


class Trunk(Module):
    """Everything below the head."""

    block: ClassVar[type[nn.Module]] = Block

    def __init__(
        self,
        spec: ModelSpec,
        options: DecoderOptions,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(
            spec.vocab_size, options.hidden_size, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            self.block(layer, options, dtype, device) for layer in spec.layers
        )
        self.norm = Norm(
            options.hidden_size, options.norm_eps, options.norm, dtype=dtype, device=device
        )


class Decoder(Module):
    """Token ids in, hidden states out; ``head`` makes logits of those that are wanted.

    ``tied`` maps absent weights to those that stand for them.
    """

    reads: ClassVar[type[DecoderOptions]] = DecoderOptions
    trunk: ClassVar[type[Trunk]] = Trunk
    product: Product | None = None

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.options = self.reads(**spec.options)
        self.model = self.trunk(spec, self.options, dtype, device)
        if not self.options.tied_embeddings:
            self.lm_head = Linear(
                self.options.hidden_size, spec.vocab_size, bias=False, dtype=dtype, device=device
            )

    def prepare(self) -> None:
        """Make the head's product."""
        self.product = self._product()

    def _product(self) -> Product:
        tied = self.options.tied_embeddings
        return self.ops.project((self.model.embed_tokens if tied else self.lm_head).weight, None)

    @property
    def tied(self) -> Mapping[str, str]:
        """Checkpoint tensors that repeat another one and may be absent or present."""
        return (
            {"lm_head.weight": "model.embed_tokens.weight"} if self.options.tied_embeddings else {}
        )

    @property
    def unused(self) -> frozenset[str]:
        """Weights by module name that a checkpoint may hold and nobody computes with."""
        return frozenset()

    def forward(self, step: Step, caches: LayerCaches) -> Tensor:
        """The step's tokens -> [T, d], what ``head`` takes."""
        hidden = self.embed(step.token_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, step, caches)
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, d], scaled."""
        hidden: Tensor = self.model.embed_tokens(token_ids)
        if self.options.embed_scale != 1.0:
            # Transformers rounds the factor to the weights' dtype first.
            hidden = hidden * torch.tensor(
                self.options.embed_scale, dtype=hidden.dtype, device=hidden.device
            )
        return hidden

    def head(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """Final norm and head of any rows: [n, d] -> logits [n, vocab], in memory of its own.

        wide: in float32; else in the model's dtype, where that tells as much: enough to compare
            them.
        """
        hidden = self.model.norm(hidden)
        logits = (self.product or self._product())(hidden)
        if self.options.logit_scale != 1.0:
            logits = logits * self.options.logit_scale
        if wide or self.options.logit_softcap is not None:
            logits = logits.float()
        if self.options.logit_softcap is not None:
            logits = self.options.logit_softcap * torch.tanh(logits / self.options.logit_softcap)
        return logits
