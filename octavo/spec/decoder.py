"""What a plain decoder-only transformer needs beyond its layers' kinds. Torch-free.

Owns ``DecoderOptions``: the content of ``ModelSpec.options`` for families whose module is
``octavo.nn.decoder:Decoder``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.base import UnsupportedError
from octavo.spec.attention import NormStyle
from octavo.spec.moe import MoEOptions

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""Names of gate activations, as in Transformers, that ``octavo.nn.mlp`` knows."""


Placement = Literal["pre", "post", "sandwich", "parallel"]


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """Shapes and quirks outside the mixers.

    norm: style of all norms. placement: where a layer has them: ahead of mixer and MLP (``pre``),
    behind them before the residual is added (``post``, OLMo 2), both (``sandwich``, Gemma), or one
    ahead of both, which run side by side (``parallel``, Cohere). embed_scale: factor of the
    embeddings, rounded to the model's dtype as Transformers does.
    pre_layers: indices of layers whose norms are ``pre`` whatever ``placement`` says. logit_scale:
        factor of the
    logits. logit_softcap: cap of the logits. moe: layers that have experts instead of an MLP.
    """

    hidden_size: int
    intermediate_size: int
    activation: str
    norm_eps: float
    norm: NormStyle = "scale"
    placement: Placement = "pre"
    pre_layers: tuple[int, ...] = ()
    embed_scale: float = 1.0
    tied_embeddings: bool = False
    mlp_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    moe: MoEOptions | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"hidden_act {self.activation!r} is not supported; supported:"
                f" {', '.join(ACTIVATIONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class WeightedOptions(DecoderOptions):
    """Options of ``octavo.nn.weighted:WeightedDecoder``: factors of the normed input and of what is
    added to it.

    mixer_factors: of each layer's mixer. mlp_factors: of every MLP.
    """

    mixer_factors: tuple[tuple[float, float], ...]
    mlp_factors: tuple[float, float]
