"""Tiny configs of state space models, alone and mixed with attention, beyond what
``tests.tiny.BASE`` has.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

F, L = "full_attention", "linear_attention"
MAMBA2 = MappingProxyType(
    {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    }
)
NO_CLAMP = MappingProxyType({"time_step_min": 1e-7, "time_step_floor": 1e-7})
"""Where Transformers clamps time steps in prompts only, and so disagrees with itself: limits that
no time step reaches.
"""

SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "mamba": {"model_type": "mamba", "num_hidden_layers": 2, "state_size": 8},
        "falcon_mamba": {
            "model_type": "falcon_mamba",
            "num_hidden_layers": 3,
            "state_size": 8,
            "conv_kernel": 3,
            "use_bias": True,
        },
        "mamba2": {
            "model_type": "mamba2",
            "num_hidden_layers": 3,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
        "mamba2_plain": {
            "model_type": "mamba2",
            "num_hidden_layers": 3,
            "state_size": 12,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.05, 0.5],
            "chunk_size": 8,
        },
        "jamba": {
            "model_type": "jamba",
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
        },
        "bamba": {
            "model_type": "bamba",
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            **MAMBA2,
        },
        "granitemoehybrid": {
            "model_type": "granitemoehybrid",
            "num_hidden_layers": 4,
            "layer_types": [L, F, L, L],
            "intermediate_size": 64,
            "shared_intermediate_size": 48,
            "num_local_experts": 4,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.125,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
            **MAMBA2,
        },
        "granite_dense": {
            "model_type": "granitemoehybrid",
            "num_hidden_layers": 3,
            "layer_types": [L, F, L],
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            **MAMBA2,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
        },
        "nemotron_h": {
            "model_type": "nemotron_h",
            "layers_block_type": [L, "mlp", F, "moe", L, "mlp"],
            "head_dim": 24,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "moe_latent_size": 24,
            **NO_CLAMP,
        },
        "falcon_h1": {
            "model_type": "falcon_h1",
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            **MAMBA2,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 0.5, 1.2, 0.7, 0.8],
            "mlp_multipliers": [0.8, 1.1],
        },
        "falcon_h1_plain": {
            "model_type": "falcon_h1",
            "num_hidden_layers": 2,
            "head_dim": 24,
            "mamba_d_ssm": 96,
            **MAMBA2,
            "mamba_n_heads": 4,
            "mamba_d_head": 24,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
        },
        "zamba2": {
            "model_type": "zamba2",
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", L, "hybrid", "hybrid"],
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            **NO_CLAMP,
        },
    }
)
