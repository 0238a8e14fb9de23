"""The Gemma 2 family: sliding-window and full layers in turn, scores and logits with soft caps. Torch-free data.

Owns class defaults and refusals of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from octavo.models.common import DECODER, IGNORED, refuse, typed_layers
from octavo.models.weights import biased, dense
from octavo.models.windowed import full_every
from octavo.spec.decoder import DecoderOptions
from octavo.spec.family import Family
from octavo.spec.kind import Config

DEFAULTS: Final = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""What Transformers' Gemma2Config takes where the file is silent. A cap that is null is no cap."""


def normalize(config: Config) -> Config:
    """Defaults filled in, ``layer_types`` spelled out: every second layer is full."""
    refuse(config, {"use_bidirectional_attention": (False,)})
    full = {**DEFAULTS, **config}
    return {**full, **full_every(2)(full)}


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return asdict(
        DecoderOptions(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=config["hidden_activation"],
            norm_eps=float(config["rms_norm_eps"]),
            norm="offset",
            placement="sandwich",
            embed_scale=float(config["hidden_size"]) ** 0.5,
            tied_embeddings=bool(config["tie_word_embeddings"]),
            logit_softcap=config["final_logit_softcapping"],
        )
    )


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    normalize=normalize,
    layers=typed_layers,
    defaults=DEFAULTS,
    parameters=dense(layer_norms=4, bias=biased, out_bias=biased),
    options=options,
    module=DECODER,
    ignored=IGNORED,
)
