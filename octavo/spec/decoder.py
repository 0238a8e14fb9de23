"""What a plain decoder-only transformer needs beyond its layers' kinds. Torch-free.

Owns ``DecoderOptions``: the content of ``ModelSpec.options`` for families whose module is ``octavo.nn.decoder:Decoder``.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.base import UnsupportedError
from octavo.spec.attention import NormStyle

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""Names of gate activations, as in Transformers, that ``octavo.nn.mlp`` knows."""


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """Shapes and quirks outside the mixers.

    norm: style of all RMSNorms. sandwich_norms: norms also behind attention and MLP, before the residual is added (Gemma).
    embed_scale: factor of the embeddings, rounded to the model's dtype as Transformers does. logit_softcap: cap of the logits.
    """

    hidden_size: int
    intermediate_size: int
    activation: str
    norm_eps: float
    norm: NormStyle = "scale"
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    tied_embeddings: bool = False
    mlp_bias: bool = False
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UnsupportedError(f"hidden_act {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
