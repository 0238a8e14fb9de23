"""Tiny random checkpoints of the supported families, written by Transformers, and what Transformers
says of them.

Owns configs, seeds and informative random weights. Every value follows from the seed.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import tiny_compressed, tiny_delta, tiny_latent, tiny_ssm

VOCAB = 384
TIE = 1e-4
"""Logits nearer than this are as good as equal in float32."""
FULL, SLIDING = "full_attention", "sliding_attention"
BASE = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
LLAMA3 = MappingProxyType(
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
)
YARN = MappingProxyType(
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
)
GEMMA = MappingProxyType(
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
    }
)
SPECS = MappingProxyType(
    {
        "llama": {"model_type": "llama", "num_hidden_layers": 4},
        "llama_rope": {
            "model_type": "llama",
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 500000.0, **LLAMA3},
        },
        "llama_yarn": {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_theta": 10000.0, **YARN},
        },
        "qwen3": {"model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 16},
        "qwen3_window": {
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
        "gemma3": dict(GEMMA),
        "gemma3_scaled": {
            **GEMMA,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "gemma2": {
            "model_type": "gemma2",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        "gemma3n": {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 8,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": VOCAB - 40,
            "hidden_size_per_layer_input": 16,
            "altup_active_idx": 1,
            "laurel_rank": 8,
            "intermediate_size": [96, 128] * 4,
            "activation_sparsity_pattern": [0.95, 0.5] + [0.0] * 6,
            "final_logit_softcapping": 5.0,
        },
        "gemma4": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 8,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            "use_double_wide_mlp": True,
        },
        "gemma4_moe": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "gemma4_values": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 48,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
        "qwen2": {
            "model_type": "qwen2",
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
        "mistral": {
            "model_type": "mistral",
            "num_hidden_layers": 4,
            "head_dim": 24,
            "sliding_window": 16,
        },
        "ministral": {
            "model_type": "ministral",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
        },
        "olmo2": {"model_type": "olmo2", "num_hidden_layers": 4, "attention_bias": True},
        "olmo3": {
            "model_type": "olmo3",
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "rope_parameters": {
                FULL: {"rope_theta": 10000.0, **YARN, "attention_factor": 1.2},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "exaone4": {
            "model_type": "exaone4",
            "num_hidden_layers": 5,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL, FULL],
            "rope_parameters": {"rope_theta": 500000.0, **LLAMA3},
        },
        "exaone4_full": {
            "model_type": "exaone4",
            "num_hidden_layers": 2,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [FULL, FULL],
        },
        "smollm3": {
            "model_type": "smollm3",
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 16,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "cohere2": {
            "model_type": "cohere2",
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "logit_scale": 0.5,
        },
        "glm4": {"model_type": "glm4", "num_hidden_layers": 4, "head_dim": 16},
        "phi3": {
            "model_type": "phi3",
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "partial_rotary_factor": 0.75,
        },
        "smollm3_full": {
            "model_type": "smollm3",
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 1],
        },
        "qwen3_moe": {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        "qwen3_moe_window": {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 3,
            "head_dim": 24,
            "moe_intermediate_size": 48,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        "glm4_moe": {
            "model_type": "glm4_moe",
            "num_hidden_layers": 3,
            "head_dim": 24,
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        "glm4_moe_plain": {
            "model_type": "glm4_moe",
            "num_hidden_layers": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.25,
            },
            "moe_intermediate_size": 32,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
        "gpt_oss": {
            "model_type": "gpt_oss",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 96,
            "sliding_window": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": {"rope_theta": 150000.0, **YARN, "truncate": False},
        },
        "llama4": {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
        "llama4_plain": {
            "model_type": "llama4_text",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": None,
            "no_rope_layers": [1, 0, 1],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
        **tiny_latent.SPECS,
        **tiny_compressed.SPECS,
        **tiny_ssm.SPECS,
        **tiny_delta.SPECS,
    }
)
"""Name -> config beyond ``BASE``. The first of each family carries its name."""


EMBEDDINGS = MappingProxyType({"gemma3n_text": 0.05, "gemma4_text": 0.05, "recurrent_gemma": 0.05})
"""Deviation of the embeddings where the usual one lets a token repeat itself: these models scale
them up and reuse them.
"""


@torch.no_grad()
def reinitialise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that logits differ: the default deviation of 0.02 makes tiny models
    nearly constant.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("dt_bias") and float(weight.mean()) > 0.5:
            weight.add_(
                noise * 0.1 - 2.5
            )  # Long time steps, as some classes begin with, forget within a few tokens.
        elif name.endswith(("linear_attn.A_log", "forget_gate.A_log")):
            weight.copy_(torch.log(torch.rand(weight.shape, generator=generator) * 0.98 + 0.02))
        elif id(weight) in embeddings:
            weight.copy_(
                noise
                * EMBEDDINGS.get(
                    model.config.model_type, 0.2 if model.config.tie_word_embeddings else 1.0
                )
            )
        elif weight.dim() >= 2:
            weight.copy_(noise * 1.2 / weight.shape[-1] ** 0.5)
        else:
            weight.add_(noise * 0.1)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        if name.endswith("tid2eid"):
            ranks = torch.rand(buffer.shape[0], model.config.n_routed_experts, generator=generator)
            buffer.copy_(ranks.argsort(dim=1)[:, : buffer.shape[1]])
    for name, factor in sorted(model.named_buffers()):
        if name.endswith("layer_scalar"):
            factor.add_(torch.randn(factor.shape, generator=generator) * 0.1)


@cache
def build(name: str, seed: int = 1234) -> Any:
    """The Transformers model in float32, eager attention."""
    given: dict[str, Any] = {**BASE, **SPECS[name]}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    reinitialise(model, seed)
    return model.eval()


def write(name: str, directory: Path) -> Path:
    """Write config.json and model.safetensors below ``directory``; returns the model's own
    directory.
    """
    target = directory / name
    if not target.exists():
        build(name).save_pretrained(target)
    return target


def prompt(length: int, seed: int = 7) -> list[int]:
    """Random token ids without special ones."""
    return torch.randint(
        3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@torch.no_grad()
def logits(name: str, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] from one forward pass without a cache."""
    return build(name)(torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def exact_logits(name: str, ids: list[int]) -> torch.Tensor:
    """As ``logits``, computed in float64."""
    return copy.deepcopy(build(name)).double()(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def greedy(name: str, ids: list[int], count: int) -> tuple[list[int], float]:
    """(``count`` greedy tokens, each from a whole forward pass without a cache; the smallest top-2
    gap on the way).
    """
    made: list[int] = []
    gap = float("inf")
    for _ in range(count):
        best = logits(name, ids + made)[-1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        made.append(int(best.indices[0]))
    return made, gap


def check_greedy(name: str, ids: list[int], made: list[int]) -> float:
    """Assert that ``made`` is what greedy choice continues ``ids`` with; returns the smallest top-2
    gap on the way.

    One forward pass without a cache says it for all tokens: each is the likeliest behind those
    before it. Nothing is asserted where the gap is below ``TIE``, since either token would do.
    """
    best = logits(name, ids + made[:-1])[len(ids) - 1 :].topk(2)
    gap = float((best.values[:, 0] - best.values[:, 1]).min())
    assert gap <= TIE or best.indices[:, 0].tolist() == made, f"{name}: not the likeliest tokens"
    return gap
