"""Models that mix attention with state space layers, layer by layer or side by side: Jamba, Bamba, Granite 4, Falcon-H1,
Nemotron-H, Zamba2. Planned for. Torch-free data.

Owns class defaults and the spellings of which layer is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ConfigError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.mamba.spec import Mamba
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import FULL, LINEAR, Mixers, layers_by_type, listed, planned
from octavo.models.mamba import rank
from octavo.models.weights import attention, embeddings, experts, gated_mlp, mamba, mamba2
from octavo.spec.kind import Config, LayerSpec, count

HYBRID, MLP, MOE = "hybrid", "mlp", "moe"

_BASE: Final = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
}
_MAMBA2: Final = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
JAMBA: Final = {
    **_BASE,
    "vocab_size": 65536,
    "num_experts": 16,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
BAMBA: Final = {**_BASE, **_MAMBA2, "attn_layer_indices": None}
FALCON_H1: Final = {
    **_BASE,
    **_MAMBA2,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_rms_norm": False,
    "projectors_bias": False,
}
GRANITE: Final = {
    **_MAMBA2,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
}
NEMOTRON_H: Final = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
ZAMBA2: Final = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": None,
    "num_hidden_layers": 54,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "adapter_rank": 128,
}


def jamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One layer in ``attn_layer_period`` is full attention; the state space layers in Mamba's words."""
    period, offset = count(config, "attn_layer_period"), count(config, "attn_layer_offset", 0)
    return {
        "layer_types": [FULL if index % period == offset else LINEAR for index in range(count(config, "num_hidden_layers"))],
        "mamba_inner_size": count(config, "mamba_expand") * count(config, "hidden_size"),
    }


def jamba_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Attention as ``self_attn``, Mamba as ``mamba``."""
    words = {"intermediate_size": "mamba_inner_size", "state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv"}
    named = {key: config[name] for key, name in words.items()}
    return layers_by_type({**config, **named}, {FULL: (("self_attn", FullAttention),), LINEAR: (("mamba", Mamba),)})


def jamba_parameters(config: Config) -> int:
    """Norms also inside Mamba; experts in one layer of ``expert_layer_period``; two norms per layer."""
    hidden, inner, made = count(config, "hidden_size"), count(config, "intermediate_size"), embeddings(config)
    conv, bias = bool(config["mamba_conv_bias"]), bool(config["mamba_proj_bias"])
    for layer in jamba_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, Mamba):
            made += mamba(kind, rank=rank(config, "mamba_dt_rank"), conv_bias=conv, bias=bias, norms=True)
        else:
            made += attention(kind.attention)
        sparse = layer.index % count(config, "expert_layer_period") == config["expert_layer_offset"]
        number = count(config, "num_experts") if sparse else 1
        made += (experts(hidden, inner, number) if number > 1 else gated_mlp(hidden, inner)) + 2 * hidden
    return made


def head_size(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``mamba_d_head`` where it is ``auto`` or absent: what ``mamba_expand`` leaves for each head."""
    if config.get("mamba_d_head") not in (None, "auto"):
        return {}
    inner, number = int(config["mamba_expand"] * count(config, "hidden_size")), count(config, "mamba_n_heads")
    if inner % number:
        raise ConfigError(f"mamba_n_heads {number} does not divide mamba_expand * hidden_size {inner}")
    return {"mamba_d_head": inner // number}


def bamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``attn_layer_indices`` are full attention."""
    full, layers = listed(config, "attn_layer_indices"), count(config, "num_hidden_layers")
    return {**head_size(config), "layer_types": [FULL if index in full else LINEAR for index in range(layers)]}


def granite_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``layer_types`` as they are; without them no layer attends."""
    return {**head_size(config), "layer_types": config.get("layer_types") or [LINEAR] * count(config, "num_hidden_layers")}


def falcon_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer has both mixers."""
    return {**head_size(config), "layer_types": [HYBRID] * count(config, "num_hidden_layers")}


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """Attention as ``self_attn``, Mamba-2 as ``mamba``; hybrid layers have both, which read the same input."""
    full, linear = ("self_attn", FullAttention), ("mamba", Mamba2)
    return layers_by_type(config, {FULL: (full,), LINEAR: (linear,), HYBRID: (full, linear)})


def parameters(config: Config) -> int:
    """Mixers of any layer, experts with a shared one (Granite) or MLPs, two norms per layer."""
    hidden, made = count(config, "hidden_size"), embeddings(config)
    bias = bool(config["mamba_proj_bias"])
    # Falcon-H1 has a key of its own for the output.
    out_bias = bool(config.get("projectors_bias", bias))
    options = {"conv_bias": bool(config["mamba_conv_bias"]), "bias": bias, "out_bias": out_bias}
    for layer in layers(config):
        made += 2 * hidden
        for _, kind in layer.mixers:
            if isinstance(kind, Mamba2):
                made += mamba2(kind, norm=bool(config.get("mamba_rms_norm", True)), **options)
            elif isinstance(kind, FullAttention):
                biased = bool(config.get("attention_bias", False))
                made += attention(kind.attention, bias=biased, out_bias=biased)
        if "shared_intermediate_size" not in config:
            made += gated_mlp(hidden, count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
            continue
        number = count(config, "num_local_experts", 0)
        made += gated_mlp(hidden, count(config, "shared_intermediate_size"))
        made += experts(hidden, count(config, "intermediate_size"), number) if number else 0
    return made


def nemotron_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``layers_block_type``, or a pattern of M (Mamba-2), E (experts), - (MLP) and * (attention), in Bamba's words."""
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None:
        pattern, letters = config.get("hybrid_override_pattern"), {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP}
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(letters):
            raise ConfigError(f"hybrid_override_pattern must be of the letters {''.join(letters)}, not {pattern!r}")
        types = [letters[letter] for letter in pattern]
    words = {"mamba_num_heads": "n_heads", "mamba_head_dim": "d_head", "ssm_state_size": "d_state"}
    named = {f"mamba_{name}": config[key] for key, name in words.items()}
    return {
        **named,
        "mamba_n_groups": config.get("mamba_n_groups", config["n_groups"]),
        "mamba_d_conv": config.get("mamba_d_conv", config["conv_kernel"]),
        "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        "layer_types": types,
        "num_hidden_layers": config.get("num_hidden_layers") or len(types),
    }


def nemotron_layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``mixer`` per layer; layers of experts or an MLP mix no tokens."""
    mixers: dict[str, Mixers] = {FULL: (("mixer", FullAttention),), LINEAR: (("mixer", Mamba2),), MLP: (), MOE: ()}
    return layers_by_type(config, mixers)


def nemotron_parameters(config: Config) -> int:
    """One mixer, MLP or set of experts (without gates) and one norm per layer."""
    hidden, made, types = count(config, "hidden_size"), embeddings(config), config["layer_types"]
    bias = bool(config.get("mlp_bias", False))
    for layer in nemotron_layers(config):
        made += hidden
        kind: Any = layer.mixers[0][1] if layer.mixers else None
        if isinstance(kind, Mamba2):
            proj = bool(config.get("use_bias", False))
            made += mamba2(kind, conv_bias=bool(config["use_conv_bias"]), bias=proj, out_bias=proj)
        elif kind is not None:
            made += attention(kind.attention)
        elif types[layer.index] == MOE:
            made += nemotron_experts(config, hidden)
        else:
            inner = count(config, "intermediate_size")
            made += 2 * hidden * inner + (inner + hidden if bias else 0)
    return made


def nemotron_experts(config: Config, hidden: int) -> int:
    """Up and down of every expert, in the latent size if there is one, the router, and a shared expert."""
    number, latent = count(config, "n_routed_experts"), config.get("moe_latent_size")
    made = 2 * number * (latent or hidden) * count(config, "moe_intermediate_size") + number * hidden
    made += 2 * hidden * latent if latent else 0
    return made + 2 * hidden * count(config, "moe_shared_expert_intermediate_size")


def zamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Attention over hidden state and embedding side by side, so heads are twice as wide; Mamba-2 in Bamba's words."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    types = config.get("layers_block_type")
    if types is None:
        raise ConfigError("layers_block_type is missing; it says which layers of a zamba2 model have attention")
    words = {"n_heads": "n_mamba_heads", "n_groups": "mamba_ngroups"}
    named: dict[str, Any] = {f"mamba_{name}": config[key] for name, key in words.items()}
    named["mamba_d_head"] = config.get("mamba_headdim")
    return {
        **named,
        **head_size({**config, **named}),
        "layer_types": types,
        "head_dim": config.get("attention_head_dim") or 2 * hidden // heads,
        "intermediate_size": config.get("intermediate_size") or 4 * hidden,
    }


def zamba_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Mamba-2 in every layer; hybrid ones share the weights of few attention blocks, each with a cache of its own."""
    mamba_only = (("mamba", Mamba2),)
    return layers_by_type(config, {LINEAR: mamba_only, HYBRID: (("shared_transformer.self_attn", FullAttention), *mamba_only)})


def zamba_parameters(config: Config) -> int:
    """Mamba-2 with a norm in every layer; shared blocks once each, and per hybrid layer a projection and adapters."""
    hidden, inner, made = count(config, "hidden_size"), count(config, "intermediate_size"), embeddings(config)
    specs, adapter_rank = zamba_layers(config), count(config, "adapter_rank")
    hybrid = [layer.mixers[0][1] for layer in specs if len(layer.mixers) > 1]
    for layer in specs:
        kind: Any = layer.mixers[-1][1]
        made += mamba2(kind, conv_bias=bool(config.get("use_conv_bias", True))) + hidden
    if hybrid:
        params: Any = hybrid[0]
        width = params.attention.num_heads * params.attention.head_dim
        block = 3 * 2 * hidden * width + width * hidden + gated_mlp(hidden, inner) + 3 * hidden
        made += min(count(config, "num_mem_blocks"), len(hybrid)) * block
        adapter = adapter_rank * (hidden + 2 * inner)
        adapter += 3 * adapter_rank * (2 * hidden + width) if config.get("use_shared_attention_adapter") else 0
        made += len(hybrid) * (hidden * hidden + adapter)
    return made


FAMILIES = (
    planned("jamba", defaults=JAMBA, spell=jamba_spell, layers=jamba_layers, parameters=jamba_parameters),
    planned("bamba", defaults=BAMBA, spell=bamba_spell, layers=layers, parameters=parameters),
    planned("granitemoehybrid", defaults=GRANITE, spell=granite_spell, layers=layers, parameters=parameters),
    planned("falcon_h1", defaults=FALCON_H1, spell=falcon_spell, layers=layers, parameters=parameters),
    planned("nemotron_h", defaults=NEMOTRON_H, spell=nemotron_spell, layers=nemotron_layers, parameters=nemotron_parameters),
    planned("zamba2", defaults=ZAMBA2, spell=zamba_spell, layers=zamba_layers, parameters=zamba_parameters),
)
