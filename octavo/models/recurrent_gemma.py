"""The RecurrentGemma family (Griffin): gated linear recurrences, and attention within a window.
Torch-free data.

Owns class defaults, which layer is which, and its checkpoints' own names. Nothing in its configs
limits the context.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.kinds.rg_lru.spec import RealGatedRecurrent
from octavo.kinds.sliding.spec import SlidingWindow
from octavo.models.common import (
    LINEAR,
    SLIDING,
    Mixers,
    decoder,
    decoder_options,
    layers_by_type,
    listed,
)
from octavo.models.mamba import NO_LIMIT
from octavo.models.weights import attention, embeddings, gated_mlp
from octavo.spec.kind import Config, LayerSpec, count

DEFAULTS: Final = {
    "vocab_size": 256000,
    "hidden_size": 2560,
    "intermediate_size": 7680,
    "num_hidden_layers": 26,
    "num_attention_heads": 10,
    "lru_width": None,
    "attention_window_size": 2048,
    "conv1d_width": 4,
    "block_types": ["recurrent", "recurrent", "attention"],
    "tie_word_embeddings": True,
    "max_position_embeddings": NO_LIMIT,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "logits_soft_cap": 30.0,
    "partial_rotary_factor": 0.5,
}
"""What Transformers' RecurrentGemmaConfig takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``block_types`` repeated; attention is always within the window, its output biased, its heads
    of what there is.
    """
    types = listed(config, "_block_types") or listed(config, "block_types") or [None]
    words, layers = {"recurrent": LINEAR, "attention": SLIDING}, count(config, "num_hidden_layers")
    return {
        "layer_types": [
            words.get(name, name) for name in (types[index % len(types)] for index in range(layers))
        ],
        "sliding_window": config["attention_window_size"],
        "lru_width": config.get("lru_width") or config["hidden_size"],
        "head_dim": count(config, "hidden_size") // count(config, "num_attention_heads"),
        "partial_rotary": True,
        "out_bias": True,
    }


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``temporal_block`` per layer."""
    mixers: dict[str, Mixers] = {
        SLIDING: (("temporal_block", SlidingWindow),),
        LINEAR: (("temporal_block", RealGatedRecurrent),),
    }
    return layers_by_type(config, mixers)


def parameters(config: Config) -> int:
    """Biases everywhere; gates of the recurrence are blocks, one per head; the MLP has half the
    size the config says.
    """
    hidden, heads, made = (
        count(config, "hidden_size"),
        count(config, "num_attention_heads"),
        embeddings(config),
    )
    for layer in layers_of(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, SlidingWindow):
            made += attention(
                kind.attention, bias=bool(config.get("attention_bias", False)), out_bias=True
            )
        else:
            width = kind.width
            made += 3 * hidden * width + 2 * width + hidden + width * kind.kernel + width
            made += 2 * (width * width // heads + width) + width
        made += gated_mlp(hidden, count(config, "intermediate_size") // 2, bias=True) + 2 * hidden
    return made


def in_bfloat16(value: float) -> float:
    """The nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module. Transformers keeps the factor of the embeddings in bfloat16
    whatever the dtype.
    """
    return decoder_options(
        config,
        activation=config["hidden_activation"],
        intermediate_size=count(config, "intermediate_size") // 2,
        norm="offset",
        mlp_bias=True,
        embed_scale=in_bfloat16(float(config["hidden_size"]) ** 0.5),
        logit_softcap=config["logits_soft_cap"],
    )


FAMILY = replace(
    decoder(
        "recurrent_gemma",
        defaults=DEFAULTS,
        spell=spell,
        layers=layers_of,
        parameters=parameters,
        options=options,
    ),
    names=(
        (r"(.*)\.temporal_pre_norm\.weight", r"\1.input_layernorm.weight"),
        (r"(.*)\.channel_pre_norm\.weight", r"\1.post_attention_layernorm.weight"),
        (r"(.*)\.mlp_block\.(.*)", r"\1.mlp.\2"),
        (r"model\.final_norm\.weight", r"model.norm.weight"),
    ),
)
