"""Cohere 2 (Command R7B, Command A): windows with rotation, every fourth layer full without,
attention beside the MLP. Torch-free data.

Owns class defaults and refusals of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.models.common import SLIDING, decoder, decoder_options, refuse, rotated_only
from octavo.models.weights import biased, dense
from octavo.models.windowed import full_every
from octavo.spec.kind import Config

DEFAULTS: Final = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
"""What Transformers' Cohere2Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers are full, and that neighbours are rotated against each other, in layers with a
    window.
    """
    refuse(
        config,
        {"use_qk_norm": (False,), "use_parallel_block": (True,), "use_gated_activation": (True,)},
    )
    return {
        **full_every(4)(config),
        "rms_norm_eps": config["layer_norm_eps"],
        "qk_norm": None,
        "interleaved_rotary": True,
        "rope_parameters": rotated_only(config, SLIDING),
    }


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(
        config, norm="center", placement="parallel", logit_scale=float(config["logit_scale"])
    )


FAMILY = decoder(
    "cohere2",
    defaults=DEFAULTS,
    spell=spell,
    options=options,
    parameters=dense(layer_norms=1, bias=biased, out_bias=biased),
)
