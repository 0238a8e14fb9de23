"""Tiny configs of latent attention, dense and sparse (DeepSeek-V2, V3, V3.2, GLM-5), beyond what
``tests.tiny.BASE`` has.

Indexers have at least 16 heads: with few, many scores are zero, and Transformers breaks ties in no
fixed way.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
}
_FULL, _SHARED = "full", "shared"

SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "deepseek_v2": {
            **_LATENT,
            "model_type": "deepseek_v2",
            "topk_method": "greedy",
            "rope_parameters": _YARN,
        },
        "deepseek_v2_groups": {
            **_LATENT,
            "model_type": "deepseek_v2",
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
        "deepseek_v3": {
            **_LATENT,
            "model_type": "deepseek_v3",
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": _YARN,
        },
        "deepseek_v3_halves": {
            **_LATENT,
            "model_type": "deepseek_v3",
            "num_hidden_layers": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            "v_head_dim": 16,
        },
        "deepseek_v32": {
            **_LATENT,
            "model_type": "deepseek_v32",
            "n_group": 2,
            "topk_group": 1,
            "index_topk": 16,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "rope_parameters": _YARN,
        },
        "deepseek_v32_narrow": {
            **_LATENT,
            "model_type": "deepseek_v32",
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "index_topk": 6,
            "index_head_dim": 24,
            "index_n_heads": 20,
        },
        "glm_moe_dsa": {
            **_LATENT,
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": 6,
            "index_topk": 16,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "indexer_types": [_FULL, _FULL, _SHARED, _FULL, _SHARED, _SHARED],
        },
        "glm_moe_dsa_wide": {
            **_LATENT,
            "model_type": "glm_moe_dsa",
            "index_topk": 23,
            "index_head_dim": 8,
            "index_n_heads": 32,
            "indexer_types": [_FULL, _SHARED, _SHARED, _FULL],
        },
    }
)
