"""Llama 4, text only: chunked layers that are rotated, full ones that are not, experts beside a
shared one. Torch-free data.

Owns class defaults, which layers are rotated and chunked and have experts, and tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError
from octavo.kinds.chunked_local.spec import ChunkedLocal
from octavo.kinds.full.spec import FullAttention
from octavo.models.common import (
    CHUNKED,
    FULL,
    IGNORED,
    Mixers,
    decoder,
    decoder_options,
    every,
    layers_by_type,
    listed,
)
from octavo.models.moe import heads, transposed
from octavo.models.weights import embeddings, experts, gated_mlp
from octavo.spec.kind import Config, LayerSpec, count
from octavo.spec.moe import MoEOptions

DEFAULTS: Final = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
"""What Transformers' Llama4TextConfig takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer is not rotated and sees everything; the others see their own chunk, if
    there are chunks.

    Raises ConfigError where ``no_rope_layers``, which says 1 of layers that are rotated, lacks
    layers.
    """
    layers = count(config, "num_hidden_layers")
    rotated = listed(config, "no_rope_layers") or [
        int(bool(name)) for name in every(config, config["no_rope_layer_interval"], "", "1")
    ]
    if len(rotated) < layers:
        raise ConfigError(
            f"no_rope_layers names {len(rotated)} layers, num_hidden_layers says {layers}"
        )
    chunks = config.get("attention_chunk_size") is not None
    types = [CHUNKED if chunks and rotated[index] else FULL for index in range(layers)]
    return {
        "no_rope_layers": rotated,
        "layer_types": config.get("layer_types") or types,
        "interleaved_rotary": True,
    }


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """Full or chunked attention by ``layer_types``; rotated, or with a temperature that grows with
    the position.
    """
    mixers: dict[str, Mixers] = {
        FULL: (("self_attn", FullAttention),),
        CHUNKED: (("self_attn", ChunkedLocal),),
    }
    tuned = (
        (config["floor_scale"], config["attn_scale"]) if config["attn_temperature_tuning"] else None
    )
    turned = layers_by_type({**config, "qk_unit_norm": config["use_qk_norm"]}, mixers)
    still = layers_by_type(
        {**config, "rope_parameters": {FULL: None, CHUNKED: None}, "temperature": tuned}, mixers
    )
    return tuple(
        turned[index] if config["no_rope_layers"][index] else still[index]
        for index in range(len(turned))
    )


def sparse_layers(config: Config) -> tuple[int, ...]:
    """``moe_layers``, by default every ``interleave_moe_layer_step``-th."""
    step = count(config, "interleave_moe_layer_step")
    given = config.get("moe_layers")
    return (
        tuple(range(step - 1, count(config, "num_hidden_layers"), step))
        if given is None
        else tuple(given)
    )


def parameters(config: Config) -> int:
    """Experts and a shared one in sparse layers, a larger MLP in the others."""
    specs, hidden, inner = (
        layers(config),
        count(config, "hidden_size"),
        count(config, "intermediate_size"),
    )
    number = len(sparse_layers(config))
    made = number * (
        experts(hidden, inner, count(config, "num_local_experts")) + gated_mlp(hidden, inner)
    )
    made += (len(specs) - number) * gated_mlp(hidden, count(config, "intermediate_size_mlp"))
    return (
        embeddings(config)
        + heads(config, specs, out_bias=bool(config.get("attention_bias", False)))
        + made
    )


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    sparse, inner = sparse_layers(config), count(config, "intermediate_size")
    moe = MoEOptions(
        layers=sparse,
        experts=count(config, "num_local_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=inner,
        shared_size=inner,
        scoring="sigmoid",
        scores_inputs=True,
    )
    return decoder_options(
        config,
        intermediate_size=count(config, "intermediate_size_mlp"),
        moe=moe if sparse else None,
    )


LAYER: Final = r"(?:language_model\.)?(model\.layers\.\d+)"

FAMILY = replace(
    decoder(
        "llama4_text",
        aliases=("llama4",),
        defaults=DEFAULTS,
        spell=spell,
        layers=layers,
        parameters=parameters,
        options=options,
    ),
    names=(
        (rf"{LAYER}\.feed_forward\.router\.(.*)", r"\1.mlp.gate.\2"),
        (rf"{LAYER}\.feed_forward\.shared_expert\.(.*)", r"\1.mlp.shared_experts.\2"),
        (rf"{LAYER}\.feed_forward\.(.*)", r"\1.mlp.\2"),
        (r"language_model\.(.*)", r"\1"),
    ),
    ignored=(*IGNORED, r"(?:vision_model|multi_modal_projector)\..*"),
    repack=transposed(interleaved=False),
)
