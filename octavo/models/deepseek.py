"""DeepSeek-V2, V3 and V3.2, Kimi K2, GLM-5: latent attention, with and without an indexer. Planned for. Torch-free data.

Owns class defaults and which layers have an indexer of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ConfigError
from octavo.kinds.dsa.spec import SparseLatent
from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.models.common import layers_by_type, listed, planned
from octavo.models.moe import routed
from octavo.models.weights import embeddings, indexer, latent_attention
from octavo.spec.kind import Config, LayerSpec, count

LATENT, INDEXED = "latent_attention", "indexed_attention"

_SHAPES: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V2: Final = {
    **_SHAPES,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
}
V3: Final = {
    **_SHAPES,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
}
V32: Final = {**V3, "max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
GLM: Final = {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 202752,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
}


def latent_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is of one type."""
    return {"layer_types": [LATENT] * count(config, "num_hidden_layers")}


def indexed_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is indexed; GLM says which share: a list, a pattern such as ``FSSF``, or by frequency behind an offset.

    Raises ConfigError where a layer has no or an unknown indexer type, or the first would share what is not there.
    """
    layers = count(config, "num_hidden_layers")
    letters, types = {"F": "full", "S": "shared"}, listed(config, "indexer_types")
    pattern = config.get("index_topk_pattern")
    types = types or (list(pattern) if isinstance(pattern, str) else listed(config, "index_topk_pattern"))
    if not types:
        period, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
        types = ["shared" if max(index - offset + 1, 0) % period else "full" for index in range(layers)]
    types = [letters.get(name, name) for name in types]
    if len(types) < layers:
        raise ConfigError(f"indexer_types names {len(types)} layers, num_hidden_layers says {layers}")
    for index, name in enumerate(types[:layers]):
        if name not in letters.values():
            raise ConfigError(f"indexer_types[{index}] {name!r} is neither full nor shared")
    if types[0] == "shared":
        raise ConfigError("indexer_types[0] is shared, but no layer before it has an indexer")
    return {"layer_types": [INDEXED] * layers, "indexer_types": types}


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer."""
    return layers_by_type(config, {LATENT: (("self_attn", MultiHeadLatent),), INDEXED: (("self_attn", SparseLatent),)})


def parameters(config: Config) -> int:
    """Latent attention and indexers, dense and routed MLPs, two norms per layer."""
    made, hidden = embeddings(config), count(config, "hidden_size")
    specs = layers(config)
    for layer in specs:
        kind: Any = layer.mixers[0][1]
        made += latent_attention(kind.latent) + 2 * hidden
        made += indexer(kind) if isinstance(kind, SparseLatent) else 0
    return made + routed(config, len(specs))


FAMILIES = (
    planned("deepseek_v2", defaults=V2, spell=latent_spell, layers=layers, parameters=parameters),
    planned("deepseek_v3", aliases=("kimi_k2",), defaults=V3, spell=latent_spell, layers=layers, parameters=parameters),
    planned("deepseek_v32", defaults=V32, spell=indexed_spell, layers=layers, parameters=parameters),
    planned("glm_moe_dsa", defaults=GLM, spell=indexed_spell, layers=layers, parameters=parameters),
)
