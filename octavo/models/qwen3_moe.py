"""Qwen3 with experts. Torch-free data.

Owns class defaults, and which layers have experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.models.common import decoder, decoder_options, listed, typed_layers
from octavo.models.moe import ONE_BY_ONE
from octavo.models.weights import attention, biased, embeddings, experts, gated_mlp
from octavo.models.windowed import window_if_used
from octavo.spec.attention import AttentionParams
from octavo.spec.kind import Config, count
from octavo.spec.moe import MoEOptions

DEFAULTS: Final = {
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
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
"""What Transformers' Qwen3MoeConfig takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Windows as in Qwen2, head norms, and one name for the number of experts."""
    return {
        **window_if_used(config),
        "qk_norm": "scale",
        "num_experts": config.get("num_local_experts", config["num_experts"]),
    }


def sparse_layers(config: Config) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer but ``mlp_only_layers``."""
    if count(config, "num_experts", 0) == 0:
        return ()
    dense, step = listed(config, "mlp_only_layers"), count(config, "decoder_sparse_step")
    return tuple(
        index
        for index in range(step - 1, count(config, "num_hidden_layers"), step)
        if index not in dense
    )


def parameters(config: Config) -> int:
    """Experts in sparse layers; norms over each head of q and k."""
    hidden, sparse, made = count(config, "hidden_size"), sparse_layers(config), embeddings(config)
    for layer in typed_layers(config):
        params: AttentionParams = layer.mixers[0][1].attention  # type: ignore[attr-defined]
        has_bias = biased(params, config)
        made += (
            attention(params, bias=has_bias, out_bias=has_bias, norms=2 * params.head_dim)
            + 2 * hidden
        )
        if layer.index in sparse:
            made += experts(
                hidden, count(config, "moe_intermediate_size"), count(config, "num_experts")
            )
        else:
            made += gated_mlp(hidden, count(config, "intermediate_size"))
    return made


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    sparse = sparse_layers(config)
    if not sparse:
        return decoder_options(config)
    moe = MoEOptions(
        layers=sparse,
        experts=count(config, "num_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=count(config, "moe_intermediate_size"),
        normalise=bool(config["norm_topk_prob"]),
    )
    return decoder_options(config, moe=moe)


FAMILY = replace(
    decoder("qwen3_moe", defaults=DEFAULTS, spell=spell, parameters=parameters, options=options),
    repack=ONE_BY_ONE,
)
