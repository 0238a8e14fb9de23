"""Small recurrences beside attention: RecurrentGemma and LFM2. Planned for. Torch-free data.

Owns class defaults and the spellings of which layer is which. Nothing in a RecurrentGemma config limits the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ceil_div
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.rg_lru.spec import RealGatedRecurrent
from octavo.kinds.short_conv.spec import ShortConv
from octavo.kinds.sliding.spec import SlidingWindow
from octavo.models.common import FULL, LINEAR, SLIDING, Mixers, layers_by_type, listed, planned
from octavo.models.mamba import NO_LIMIT
from octavo.models.weights import attention, embeddings, gated_mlp
from octavo.spec.kind import Config, LayerSpec, count

CONV = "conv"

GRIFFIN: Final = {
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
}
LFM2: Final = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}


def griffin_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``block_types`` repeated; attention is always within the window."""
    types = listed(config, "_block_types") or listed(config, "block_types") or [None]
    words, layers = {"recurrent": LINEAR, "attention": SLIDING}, count(config, "num_hidden_layers")
    return {
        "layer_types": [words.get(name, name) for name in (types[index % len(types)] for index in range(layers))],
        "sliding_window": config["attention_window_size"],
        "lru_width": config.get("lru_width") or config["hidden_size"],
    }


def griffin_layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``temporal_block`` per layer."""
    mixers: dict[str, Mixers] = {
        SLIDING: (("temporal_block", SlidingWindow),),
        LINEAR: (("temporal_block", RealGatedRecurrent),),
    }
    return layers_by_type(config, mixers)


def griffin_parameters(config: Config) -> int:
    """Biases everywhere; gates of the recurrence are blocks, one per head; the MLP has half the size the config says."""
    hidden, heads, made = count(config, "hidden_size"), count(config, "num_attention_heads"), embeddings(config)
    for layer in griffin_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, SlidingWindow):
            made += attention(kind.attention, bias=bool(config.get("attention_bias", False)), out_bias=True)
        else:
            width = kind.width
            made += 3 * hidden * width + 2 * width + hidden + width * kind.kernel + width
            made += 2 * (width * width // heads + width) + width
        made += gated_mlp(hidden, count(config, "intermediate_size") // 2, bias=True) + 2 * hidden
    return made


def lfm2_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``full_attn_idxs`` attend, by default all; the MLP's size by its older name."""
    layers = count(config, "num_hidden_layers")
    full = listed(config, "full_attn_idxs") if config.get("full_attn_idxs") is not None else range(layers)
    types = [FULL if index in full else CONV for index in range(layers)]
    return {
        "layer_types": config.get("layer_types") or types,
        "intermediate_size": config.get("block_ff_dim") or config["intermediate_size"],
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }


def lfm2_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Attention as ``self_attn``, convolutions as ``conv``."""
    return layers_by_type(config, {FULL: (("self_attn", FullAttention),), CONV: (("conv", ShortConv),)})


def lfm2_parameters(config: Config) -> int:
    """Head norms in attention, three gates in convolutions; the MLP's size rounded as the config says; two norms per layer."""
    hidden, inner, made = count(config, "hidden_size"), count(config, "intermediate_size"), embeddings(config)
    if config["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = count(config, "block_multiple_of")
            inner = multiple * ceil_div(int(config["block_ffn_dim_multiplier"] * inner), multiple)
    for layer in lfm2_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, ShortConv):
            made += 4 * hidden * hidden + hidden * kind.kernel + (5 * hidden if config["conv_bias"] else 0)
        else:
            made += attention(kind.attention, norms=2 * kind.attention.head_dim)
        made += gated_mlp(hidden, inner) + 2 * hidden
    return made


FAMILIES = (
    planned(
        "recurrent_gemma",
        defaults=GRIFFIN,
        spell=griffin_spell,
        layers=griffin_layers,
        parameters=griffin_parameters,
    ),
    planned("lfm2", defaults=LFM2, spell=lfm2_spell, layers=lfm2_layers, parameters=lfm2_parameters),
)
