"""gpt-oss: attention sinks, a window in every other layer, experts with biases in all of them.
Torch-free data.

Owns class defaults and tensor names. A sink is a weight, a logit per head, nothing that a cache
keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.models.common import (
    FULL,
    SLIDING,
    decoder,
    decoder_options,
    every,
    refuse,
    typed_layers,
)
from octavo.models.moe import heads, transposed
from octavo.models.weights import embeddings, experts
from octavo.spec.kind import Config, count
from octavo.spec.moe import MoEOptions

DEFAULTS: Final = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 150000.0,
    "hidden_act": "silu",
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
"""What Transformers' GptOssConfig takes where the file is silent."""

YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""The rotation of configs that do not say."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A window in every other layer, the first one on; sinks; the class' own rotation where none is
    given.
    """
    refuse(config, {"hidden_act": ("silu",)})
    return {
        "layer_types": config.get("layer_types") or every(config, 2, FULL, SLIDING),
        "rope_scaling": config.get("rope_parameters") or config.get("rope_scaling") or YARN,
        "sinks": True,
    }


def parameters(config: Config) -> int:
    """Experts with biases in every layer, a sink per head, biases everywhere."""
    layers, hidden = typed_layers(config), count(config, "hidden_size")
    inner, number = count(config, "intermediate_size"), count(config, "num_local_experts")
    made = (
        experts(hidden, inner, number)
        + number * (2 * inner + hidden)
        + number
        + count(config, "num_attention_heads")
    )
    return (
        embeddings(config)
        + heads(config, layers, out_bias=bool(config["attention_bias"]))
        + len(layers) * made
    )


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    moe = MoEOptions(
        layers=tuple(range(count(config, "num_hidden_layers"))),
        experts=count(config, "num_local_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=count(config, "intermediate_size"),
        normalise=True,
        router_bias=True,
        bias=True,
        clamp=(float(config["swiglu_limit"]), float(config["swiglu_alpha"])),
    )
    return decoder_options(config, norm="wide", moe=moe)


FAMILY = replace(
    decoder("gpt_oss", defaults=DEFAULTS, spell=spell, parameters=parameters, options=options),
    names=((r"(model\.layers\.\d+\.mlp)\.router\.(.*)", r"\1.gate.\2"),),
    repack=transposed(interleaved=True),
    quantised=("mxfp4",),
)
