"""Models that mix full attention with gated delta nets or lightning attention: Qwen3-Next, Qwen3.5, OLMo Hybrid, MiniMax, and
Kimi Linear with delta attention and latents. Planned for. Torch-free data.

Owns class defaults and the spellings of which layer is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ConfigError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.gated_delta_net.spec import GatedDeltaNet
from octavo.kinds.kda.spec import KimiDelta
from octavo.kinds.lightning.spec import Lightning
from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.models.common import FULL, LINEAR, every, layers_by_type, listed, planned
from octavo.models.moe import routed
from octavo.models.weights import attention, embeddings, experts, gated_delta_net, gated_mlp, kimi_delta, latent_attention
from octavo.spec.kind import Config, LayerSpec, count

_DELTA: Final = {
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_EXPERTS: Final = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
QWEN3_NEXT: Final = {**_DELTA, **_EXPERTS, "intermediate_size": 5632, "num_hidden_layers": 48, "num_experts": 512}
QWEN3_5: Final = {
    **_DELTA,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_experts": 0,
}
QWEN3_5_MOE: Final = {**_DELTA, **_EXPERTS, "vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256}
OLMO_HYBRID: Final = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "linear_conv_kernel_dim": 4,
}
MINIMAX: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
}
KIMI: Final = {
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
    "first_k_dense_replace": 1,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "model_max_length": 1048576,
}


def qwen_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One layer in ``full_attention_interval`` is full."""
    return {"layer_types": config.get("layer_types") or every(config, config["full_attention_interval"], FULL, LINEAR)}


def delta_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Full attention as ``self_attn``, gated delta nets as ``linear_attn``."""
    return layers_by_type(config, {FULL: (("self_attn", FullAttention),), LINEAR: (("linear_attn", GatedDeltaNet),)})


def qwen_parameters(config: Config) -> int:
    """Gated attention with head norms, delta nets; MLPs or experts with a gated shared one; two norms per layer."""
    hidden, number, made = count(config, "hidden_size"), count(config, "num_experts", 0), embeddings(config)
    dense, step = listed(config, "mlp_only_layers"), config.get("decoder_sparse_step") or 1
    for layer in delta_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, GatedDeltaNet):
            made += gated_delta_net(kind)
        else:
            biased = bool(config.get("attention_bias", False))
            made += attention(kind.attention, gate=True, norms=2 * kind.attention.head_dim, bias=biased, out_bias=biased)
        if number and layer.index not in dense and (layer.index + 1) % step == 0:
            made += experts(hidden, count(config, "moe_intermediate_size"), number) + hidden
            made += gated_mlp(hidden, count(config, "shared_expert_intermediate_size"))
        else:
            made += gated_mlp(hidden, count(config, "intermediate_size"))
        made += 2 * hidden
    return made


def olmo_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer is full, the last one of fewer; sizes of the delta nets follow from those of attention."""
    types = listed(config, "layer_types") or every(config, 4, FULL, LINEAR)
    if FULL not in types:
        types = [*types[:-1], FULL]
    heads = config.get("linear_num_key_heads") or count(config, "num_attention_heads")
    keys = config.get("linear_key_head_dim") or int(0.75 * count(config, "hidden_size") / heads)
    return {
        "layer_types": types,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": config.get("linear_num_value_heads") or config["num_attention_heads"],
        "linear_key_head_dim": keys,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * keys,
    }


def olmo_parameters(config: Config) -> int:
    """Attention with norms over all heads, delta nets, MLPs, two norms per layer."""
    hidden, made = count(config, "hidden_size"), embeddings(config)
    for layer in delta_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, GatedDeltaNet):
            made += gated_delta_net(kind)
        else:
            params, biased = kind.attention, bool(config.get("attention_bias", False))
            norms = (params.num_heads + params.num_kv_heads) * params.head_dim
            made += attention(params, norms=norms, bias=biased, out_bias=biased)
        made += gated_mlp(hidden, count(config, "intermediate_size")) + 2 * hidden
    return made


def minimax_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Full and linear layers by turns; the original checkpoints say ``attn_type_list``, 1 for full."""
    listed = config.get("attn_type_list")
    types = config.get("layer_types") or (
        [FULL if kind else LINEAR for kind in listed] if listed else every(config, 2, LINEAR, FULL)
    )
    return {"layer_types": types, "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


def minimax_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Full or lightning attention, both as ``self_attn``."""
    return layers_by_type(config, {FULL: (("self_attn", FullAttention),), LINEAR: (("self_attn", Lightning),)})


def minimax_parameters(config: Config) -> int:
    """Lightning layers have q, k, v, a gate and a norm over all heads; every layer has experts and two norms."""
    hidden, made = count(config, "hidden_size"), embeddings(config)
    mlp = experts(hidden, count(config, "intermediate_size"), count(config, "num_local_experts"))
    for layer in minimax_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, Lightning):
            inner = kind.num_heads * kind.head_dim
            made += 5 * hidden * inner + inner
        else:
            made += attention(kind.attention)
        made += mlp + 2 * hidden
    return made


def kimi_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``linear_attn_config`` of the checkpoints unfolded; its layer numbers count from 1. Raises ConfigError for gaps."""
    inner, layers = config.get("linear_attn_config") or {}, count(config, "num_hidden_layers")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"linear_attn_config must be a mapping, not {inner!r}")
    types = config.get("layer_types")
    if types is None and inner:
        named = {
            index: name for key, name in (("full_attn_layers", FULL), ("kda_layers", LINEAR)) for index in listed(inner, key)
        }
        missing = [index for index in range(1, layers + 1) if index not in named]
        if missing:
            raise ConfigError(f"linear_attn_config names no type for layer {missing[0]} (counted from 1)")
        types = [named[index + 1] for index in range(layers)]
    if types is None:
        types = [FULL if index and index % 4 == 0 else LINEAR for index in range(layers)]
    return {
        "layer_types": types,
        "linear_head_dim": inner.get("head_dim", config["linear_head_dim"]),
        "linear_num_heads": inner.get("num_heads", config["linear_num_heads"]),
        "linear_conv_kernel_dim": inner.get("short_conv_kernel_size", config["linear_conv_kernel_dim"]),
        "max_position_embeddings": config.get("max_position_embeddings", config["model_max_length"]),
        "n_routed_experts": config.get("num_local_experts", config["num_experts"]),
        "n_shared_experts": config["num_shared_experts"],
    }


def kimi_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Latent attention or delta attention, both as ``self_attn``."""
    return layers_by_type(config, {FULL: (("self_attn", MultiHeadLatent),), LINEAR: (("self_attn", KimiDelta),)})


def kimi_parameters(config: Config) -> int:
    """Latent and delta attention, dense and routed MLPs, two norms per layer."""
    hidden, made, layers = count(config, "hidden_size"), embeddings(config), kimi_layers(config)
    for layer in layers:
        kind: Any = layer.mixers[0][1]
        made += kimi_delta(kind) if isinstance(kind, KimiDelta) else latent_attention(kind.latent)
        made += 2 * hidden
    return made + routed(config, len(layers))


FAMILIES = (
    planned("qwen3_next", defaults=QWEN3_NEXT, spell=qwen_spell, layers=delta_layers, parameters=qwen_parameters),
    planned(
        "qwen3_5_text",
        aliases=("qwen3_5",),
        defaults=QWEN3_5,
        spell=qwen_spell,
        layers=delta_layers,
        parameters=qwen_parameters,
    ),
    planned(
        "qwen3_5_moe_text",
        aliases=("qwen3_5_moe",),
        defaults=QWEN3_5_MOE,
        spell=qwen_spell,
        layers=delta_layers,
        parameters=qwen_parameters,
    ),
    planned("olmo_hybrid", defaults=OLMO_HYBRID, spell=olmo_spell, layers=delta_layers, parameters=olmo_parameters),
    planned(
        "minimax",
        aliases=("minimax_text_01", "minimax_m1"),
        defaults=MINIMAX,
        spell=minimax_spell,
        layers=minimax_layers,
        parameters=minimax_parameters,
    ),
    planned("kimi_linear", defaults=KIMI, spell=kimi_spell, layers=kimi_layers, parameters=kimi_parameters),
)
