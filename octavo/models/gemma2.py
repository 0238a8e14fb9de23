"""The Gemma 2 family: sliding-window and full layers in turn, scores and logits with soft caps.
Torch-free data.

Owns class defaults and refusals of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.models.common import decoder, decoder_options, refuse
from octavo.models.weights import biased, dense
from octavo.models.windowed import full_every
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


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every second layer is full."""
    refuse(config, {"use_bidirectional_attention": (False,)})
    return full_every(2)(config)


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(
        config,
        activation=config["hidden_activation"],
        norm="offset",
        placement="sandwich",
        embed_scale=float(config["hidden_size"]) ** 0.5,
        logit_softcap=config["final_logit_softcapping"],
    )


FAMILY = decoder(
    "gemma2",
    defaults=DEFAULTS,
    spell=spell,
    options=options,
    parameters=dense(layer_norms=4, bias=biased, out_bias=biased),
)
