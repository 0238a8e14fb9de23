"""Tiny configs of compressed attention (DeepSeek-V4), beyond what ``tests.tiny.BASE`` has.

Index heads are many, so that no two entries have a score of exactly 0: Transformers has no rule for
ties.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

WINDOW, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
YARN = MappingProxyType(
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
)
V4 = MappingProxyType(
    {
        "model_type": "deepseek_v4",
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "hc_sinkhorn_iters": 6,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "rope_parameters": dict(YARN),
    }
)
SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "deepseek_v4": {
            **V4,
            "num_hidden_layers": 4,
            "layer_types": [WINDOW, SPARSE, HEAVY, SPARSE],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "sliding_window": 16,
            "compress_rates": {SPARSE: 4, HEAVY: 16},
            "index_topk": 8,
        },
        "deepseek_v4_r128": {
            **V4,
            "num_hidden_layers": 3,
            "layer_types": [HEAVY, SPARSE, HEAVY],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "sliding_window": 128,
            "compress_rates": {SPARSE: 4, HEAVY: 128},
            "index_topk": 24,
        },
        "deepseek_v4_mixed": {
            **V4,
            "num_hidden_layers": 4,
            "layer_types": [SPARSE, HEAVY, SPARSE, WINDOW],
            "mlp_layer_types": ["moe"] * 4,
            "num_attention_heads": 6,
            "head_dim": 24,
            "partial_rotary_factor": 0.5,
            "o_groups": 3,
            "sliding_window": 9,
            "compress_rates": {SPARSE: 2, HEAVY: 8},
            "index_topk": 3,
            "index_n_heads": 32,
            "hc_mult": 2,
            "swiglu_limit": 1.0,
        },
    }
)
