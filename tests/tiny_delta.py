"""Tiny configs of linear attention, delta nets and other recurrences, beyond what
``tests.tiny.BASE`` has.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from tests.linear_transformer import register

register()

FULL, LINEAR = "full_attention", "linear_attention"

DELTA = MappingProxyType(
    {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": [LINEAR, FULL, LINEAR],
    }
)
EXPERTS = MappingProxyType(
    {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
)
GRIFFIN = MappingProxyType(
    {
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 192,
        "attention_window_size": 16,
        "logits_soft_cap": 5.0,
    }
)
MINIMAX = MappingProxyType(
    {
        "model_type": "minimax",
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "block_size": 16,
        "num_local_experts": 4,
        "linear_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.8,
        "mlp_alpha_factor": 0.7,
        "mlp_beta_factor": 1.2,
    }
)
SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "lfm2": {
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", FULL, "conv", FULL],
            "block_multiple_of": 16,
        },
        "lfm2_biased": {
            "model_type": "lfm2",
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        "qwen3_next": {"model_type": "qwen3_next", **DELTA, **EXPERTS},
        "qwen3_next_equal": {
            "model_type": "qwen3_next",
            **DELTA,
            **EXPERTS,
            "layer_types": [LINEAR, LINEAR, FULL],
            "head_dim": 24,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        "qwen3_5": {
            "model_type": "qwen3_5_text",
            **DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "qwen3_5_moe": {
            "model_type": "qwen3_5_moe_text",
            **DELTA,
            **EXPERTS,
            "linear_num_value_heads": 2,
        },
        "olmo_hybrid": {
            "model_type": "olmo_hybrid",
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, FULL, LINEAR],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
        },
        "olmo_hybrid_rotated": {
            "model_type": "olmo_hybrid",
            "num_hidden_layers": 3,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "minimax": {**MINIMAX, "layer_types": [LINEAR, FULL, LINEAR]},
        "minimax_full_first": dict(MINIMAX),
        "recurrent_gemma": dict(GRIFFIN),
        "recurrent_gemma_wide": {
            **GRIFFIN,
            "hidden_size": 96,
            "lru_width": 96,
            "conv1d_width": 3,
            "attention_bias": True,
        },
        "kimi_linear": {
            "model_type": "kimi_linear",
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "layer_types": [LINEAR, FULL, LINEAR],
            "linear_head_dim": 16,
            "linear_num_heads": 3,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        "linear_transformer": {
            "model_type": "linear_transformer",
            "num_hidden_layers": 2,
            "head_dim": 12,
        },
    }
)
