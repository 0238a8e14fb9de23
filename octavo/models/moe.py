"""Decoders of plain attention with experts that can be planned for: Qwen3-MoE, GLM-4.5, gpt-oss, Llama 4. Torch-free data.

Owns their class defaults, which layers have a window or chunks, and what their layers have beside projections. The attention
sinks of gpt-oss are weights: a logit per head, nothing that a cache keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.kinds.chunked_local.spec import ChunkedLocal
from octavo.kinds.full.spec import FullAttention
from octavo.models.common import CHUNKED, FULL, SLIDING, every, layers_by_type, listed, planned, typed_layers
from octavo.models.weights import attention, biased, embeddings, experts, gated_mlp, mixers
from octavo.models.windowed import full_everywhere, window_if_used
from octavo.spec.attention import AttentionParams
from octavo.spec.kind import Config, LayerSpec, count

QWEN3_MOE: Final = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 0,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "mlp_only_layers": (),
}
GLM4_MOE: Final = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GPT_OSS: Final = {
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
}
LLAMA4: Final = {
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
}


def heads(config: Config, layers: tuple[LayerSpec, ...], **options: Any) -> int:
    """Weights of all attention, biased as ``attention_bias`` says, and two norms per layer."""
    hidden, made = count(config, "hidden_size"), 0
    for kind in mixers(layers):
        params: AttentionParams = kind.attention  # type: ignore[attr-defined]
        made += attention(params, bias=biased(params, config), **options) + 2 * hidden
    return made


def qwen3_moe_parameters(config: Config) -> int:
    """Experts in every ``decoder_sparse_step``-th layer but ``mlp_only_layers``; norms over each head of q and k."""
    layers, hidden = typed_layers(config), count(config, "hidden_size")
    number = count({**config, "num_experts": config.get("num_local_experts", config["num_experts"])}, "num_experts", 0)
    dense, step = listed(config, "mlp_only_layers"), count(config, "decoder_sparse_step")
    made = embeddings(config)
    for layer in layers:
        params: AttentionParams = layer.mixers[0][1].attention  # type: ignore[attr-defined]
        has_bias = biased(params, config)
        made += attention(params, bias=has_bias, out_bias=has_bias, norms=2 * params.head_dim) + 2 * hidden
        if layer.index in dense or number == 0 or (layer.index + 1) % step:
            made += gated_mlp(hidden, count(config, "intermediate_size"))
        else:
            made += experts(hidden, count(config, "moe_intermediate_size"), number)
    return made


def glm4_moe_parameters(config: Config) -> int:
    """Experts and a shared one behind the first ``first_k_dense_replace`` layers."""
    layers = typed_layers(config)
    norms = 2 * layers[0].mixers[0][1].attention.head_dim if config.get("use_qk_norm") else 0  # type: ignore[attr-defined]
    return embeddings(config) + heads(config, layers, norms=norms) + routed(config, len(layers))


def routed(config: Config, layers: int) -> int:
    """Weights of all MLPs by DeepSeek's key names: dense in the first layers, then routed and shared experts."""
    hidden, inner = count(config, "hidden_size"), count(config, "moe_intermediate_size")
    shared, number = count({"n_shared_experts": 0, **config}, "n_shared_experts", 0), count(config, "n_routed_experts")
    dense = min(count(config, "first_k_dense_replace", 0), layers)
    sparse = experts(hidden, inner, number) + gated_mlp(hidden, inner * shared)
    made = (layers - dense) * sparse
    return made + (dense * gated_mlp(hidden, count(config, "intermediate_size")) if dense else 0)


def gpt_oss_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A window in every other layer, the first one on."""
    return {"layer_types": config.get("layer_types") or every(config, 2, FULL, SLIDING)}


def gpt_oss_parameters(config: Config) -> int:
    """Experts with biases in every layer, a sink per head, biases everywhere."""
    layers, hidden = typed_layers(config), count(config, "hidden_size")
    inner, number = count(config, "intermediate_size"), count(config, "num_local_experts")
    made = experts(hidden, inner, number) + number * (2 * inner + hidden) + number + count(config, "num_attention_heads")
    return embeddings(config) + heads(config, layers, out_bias=bool(config["attention_bias"])) + len(layers) * made


def llama4_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer is not rotated and sees everything; the others see their own chunk, if there are chunks."""
    if config.get("layer_types"):
        return {}
    rotated = config.get("no_rope_layers") or every(config, config["no_rope_layer_interval"], "", "rope")
    chunks = config.get("attention_chunk_size") is not None
    return {"layer_types": [CHUNKED if chunks and has_rope else FULL for has_rope in rotated]}


def llama4_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Full or chunked attention by ``layer_types``."""
    return layers_by_type(config, {FULL: (("self_attn", FullAttention),), CHUNKED: (("self_attn", ChunkedLocal),)})


def llama4_parameters(config: Config) -> int:
    """Experts and a shared one in ``moe_layers``, by default every ``interleave_moe_layer_step``-th."""
    layers, hidden = llama4_layers(config), count(config, "hidden_size")
    step, inner = count(config, "interleave_moe_layer_step"), count(config, "intermediate_size")
    sparse = config.get("moe_layers")
    number = len(sparse) if sparse is not None else len(range(step - 1, len(layers), step))
    made = number * (experts(hidden, inner, count(config, "num_local_experts")) + gated_mlp(hidden, inner))
    made += (len(layers) - number) * gated_mlp(hidden, count(config, "intermediate_size_mlp"))
    return embeddings(config) + heads(config, layers, out_bias=bool(config.get("attention_bias", False))) + made


FAMILIES = (
    planned("qwen3_moe", defaults=QWEN3_MOE, spell=window_if_used, parameters=qwen3_moe_parameters),
    planned("glm4_moe", defaults=GLM4_MOE, spell=full_everywhere, parameters=glm4_moe_parameters),
    planned("gpt_oss", defaults=GPT_OSS, spell=gpt_oss_spell, parameters=gpt_oss_parameters),
    planned(
        "llama4_text",
        aliases=("llama4",),
        defaults=LLAMA4,
        spell=llama4_spell,
        layers=llama4_layers,
        parameters=llama4_parameters,
    ),
)
