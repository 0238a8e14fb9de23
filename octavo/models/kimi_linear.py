"""Kimi Linear: delta attention with a decay per channel, and latent attention without rotation.
Torch-free data.

Owns class defaults, which layer is which, and its checkpoints' own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError
from octavo.kinds.kda.spec import KimiDelta
from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.models.common import (
    FULL,
    LINEAR,
    decoder,
    decoder_options,
    layers_by_type,
    listed,
    refuse,
)
from octavo.models.moe import MIXTRAL_NAMES, W_ONE_BY_ONE, behind_dense, corrected, routed
from octavo.models.weights import embeddings, kimi_delta, latent_attention
from octavo.spec.family import Repack
from octavo.spec.kind import Config, LayerSpec, count

DEFAULTS: Final = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_shared_experts": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "model_max_length": 1048576,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""What Transformers' KimiLinearConfig takes where the file is silent."""

ALSO: Final = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
"""DeepSeek's words, which Transformers takes too, and Kimi's own."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``linear_attn_config`` of the checkpoints unfolded; its layer numbers count from 1. Raises
    ConfigError for gaps.
    """
    refuse(
        config,
        {
            "mla_use_nope": (True,),
            "moe_router_activation_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
    )
    inner = config.get("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"linear_attn_config must be a mapping, not {inner!r}")
    also = {ours: config.get(ours, config[theirs]) for ours, theirs in ALSO.items()}
    return {
        **also,
        "n_routed_experts": config.get("num_local_experts", also["n_routed_experts"]),
        "layer_types": config.get("layer_types") or layer_types(config, inner),
        "linear_head_dim": inner.get("head_dim", config["linear_head_dim"]),
        "linear_num_heads": inner.get("num_heads", config["linear_num_heads"]),
        "linear_conv_kernel_dim": inner.get(
            "short_conv_kernel_size", config["linear_conv_kernel_dim"]
        ),
        "rope_parameters": {FULL: None},
    }


def layer_types(config: Mapping[str, Any], inner: Mapping[str, Any]) -> list[str]:
    """As ``linear_attn_config`` says, else every fourth full, from the fifth on."""
    layers = count(config, "num_hidden_layers")
    if not inner:
        return [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    named = {
        index: name
        for key, name in (("full_attn_layers", FULL), ("kda_layers", LINEAR))
        for index in listed(inner, key)
    }
    missing = [index for index in range(1, layers + 1) if index not in named]
    if missing:
        raise ConfigError(
            f"linear_attn_config names no type for layer {missing[0]} (counted from 1)"
        )
    return [named[index + 1] for index in range(layers)]


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """Latent attention or delta attention, both as ``self_attn``."""
    return layers_by_type(
        config, {FULL: (("self_attn", MultiHeadLatent),), LINEAR: (("self_attn", KimiDelta),)}
    )


def parameters(config: Config) -> int:
    """Latent and delta attention, dense and routed MLPs, two norms per layer."""
    hidden, made, layers = count(config, "hidden_size"), embeddings(config), layers_of(config)
    for layer in layers:
        kind: Any = layer.mixers[0][1]
        made += kimi_delta(kind) if isinstance(kind, KimiDelta) else latent_attention(kind.latent)
        made += 2 * hidden
    return made + routed(config, len(layers))


def sparse_layers(config: Config) -> tuple[int, ...]:
    """By ``mlp_layer_types``, else all behind the first ``first_k_dense_replace``."""
    layers, types = count(config, "num_hidden_layers"), listed(config, "mlp_layer_types")
    if types:
        return tuple(index for index in range(layers) if types[index] == "sparse")
    return behind_dense(config)


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(config, moe=corrected(config, sparse_layers(config)))


FAMILY = replace(
    decoder(
        "kimi_linear",
        defaults=DEFAULTS,
        spell=spell,
        layers=layers_of,
        parameters=parameters,
        options=options,
    ),
    names=(*MIXTRAL_NAMES, (r"(.*\.self_attn)\.forget_gate\.(.*)", r"\1.\2")),
    repack=(
        *W_ONE_BY_ONE,
        *(
            Repack(
                pattern=rf"(.*\.self_attn)\.{name}_conv1d\.weight",
                into=(r"\1.conv1d.weight",),
                part=part,
            )
            for name, part in (("q", 0), ("k", 1), ("v", -1))
        ),
    ),
)
