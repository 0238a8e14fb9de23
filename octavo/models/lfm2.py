"""The LFM2 family: gated short convolutions and full attention. Torch-free data.

Owns class defaults, which layer is which, the size of the MLP, and its checkpoints' own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import ceil_div
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.short_conv.spec import ShortConv
from octavo.models.common import FULL, decoder, decoder_options, layers_by_type, listed
from octavo.models.weights import attention, embeddings, gated_mlp
from octavo.spec.kind import Config, LayerSpec, count

CONV = "conv"

DEFAULTS: Final = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
"""What Transformers' Lfm2Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``full_attn_idxs`` attend, by default all; the MLP's size by its older name, and rounded as
    the config says.
    """
    layers = count(config, "num_hidden_layers")
    full = (
        listed(config, "full_attn_idxs")
        if config.get("full_attn_idxs") is not None
        else range(layers)
    )
    types = [FULL if index in full else CONV for index in range(layers)]
    return {
        "layer_types": config.get("layer_types") or types,
        "intermediate_size": inner_size(config),
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
        "rms_norm_eps": config["norm_eps"],
        "hidden_act": "silu",
        "qk_norm": "scale",
    }


def inner_size(config: Mapping[str, Any]) -> int:
    """Of the MLP: two thirds of what is given, times a factor, rounded up, unless it is to be taken
    as it is.
    """
    inner = count(
        {"intermediate_size": config.get("block_ff_dim") or config["intermediate_size"]},
        "intermediate_size",
    )
    if config["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = count(config, "block_multiple_of")
            inner = multiple * ceil_div(int(config["block_ffn_dim_multiplier"] * inner), multiple)
    return inner


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """Attention as ``self_attn``, convolutions as ``conv``."""
    return layers_by_type(
        config, {FULL: (("self_attn", FullAttention),), CONV: (("conv", ShortConv),)}
    )


def parameters(config: Config) -> int:
    """Head norms in attention, three gates in convolutions; two norms per layer."""
    hidden, made = count(config, "hidden_size"), embeddings(config)
    for layer in layers_of(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, ShortConv):
            made += (
                4 * hidden * hidden
                + hidden * kind.kernel
                + (5 * hidden if config["conv_bias"] else 0)
            )
        else:
            made += attention(kind.attention, norms=2 * kind.attention.head_dim)
        made += gated_mlp(hidden, count(config, "intermediate_size")) + 2 * hidden
    return made


FAMILY = replace(
    decoder(
        "lfm2",
        defaults=DEFAULTS,
        spell=spell,
        layers=layers_of,
        parameters=parameters,
        options=decoder_options,
    ),
    names=(
        (r"(.*)\.operator_norm\.weight", r"\1.input_layernorm.weight"),
        (r"(.*)\.ffn_norm\.weight", r"\1.post_attention_layernorm.weight"),
        (r"(.*)\.feed_forward\.w1\.weight", r"\1.mlp.gate_proj.weight"),
        (r"(.*)\.feed_forward\.w3\.weight", r"\1.mlp.up_proj.weight"),
        (r"(.*)\.feed_forward\.w2\.weight", r"\1.mlp.down_proj.weight"),
        (r"(.*)\.self_attn\.out_proj\.weight", r"\1.self_attn.o_proj.weight"),
        (r"(.*)\.self_attn\.(q|k)_layernorm\.weight", r"\1.self_attn.\2_norm.weight"),
        (r"model\.embedding_norm\.weight", r"model.norm.weight"),
    ),
)
