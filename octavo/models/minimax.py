"""MiniMax-01: lightning and full attention, experts, residuals of normed inputs. Torch-free data.

Owns class defaults, which layer is which, and factors of residuals. The models as first published
(``minimax_text_01``, ``minimax_m1``) are planned for; those converted to Transformers' class are
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.kinds.full.spec import FullAttention
from octavo.kinds.lightning.spec import Lightning
from octavo.models.common import (
    FULL,
    IGNORED,
    LINEAR,
    decoder,
    decoder_options,
    every,
    layers_by_type,
    listed,
    refuse,
)
from octavo.models.moe import MIXTRAL_NAMES, W_ONE_BY_ONE
from octavo.models.weights import attention, embeddings, experts
from octavo.spec.decoder import WeightedOptions
from octavo.spec.kind import Config, LayerSpec, count
from octavo.spec.moe import MoEOptions

DEFAULTS: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "full_attn_alpha_factor": 1,
    "full_attn_beta_factor": 1,
    "linear_attn_alpha_factor": 1,
    "linear_attn_beta_factor": 1,
    "mlp_alpha_factor": 1,
    "mlp_beta_factor": 1,
}
"""What Transformers' MiniMaxConfig takes where the file is silent."""

WORDS: Final = {
    FULL: "full_attn",
    LINEAR: "linear_attn",
    "attention": "full_attn",
    "mamba": "linear_attn",
}
"""How factors call the types of layers."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Full and linear layers by turns; the original checkpoints say ``attn_type_list``, 1 for
    full.
    """
    refuse(
        config,
        {"model_type": ("minimax",), "sliding_window": (), "rotary_dim": (config.get("head_dim"),)},
    )
    given = listed(config, "attn_type_list")
    types = config.get("layer_types") or (
        [FULL if kind else LINEAR for kind in given] if given else every(config, 2, LINEAR, FULL)
    )
    return {
        "layer_types": types,
        "head_dim": (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        ),
    }


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """Full or lightning attention, both as ``self_attn``."""
    return layers_by_type(
        config, {FULL: (("self_attn", FullAttention),), LINEAR: (("self_attn", Lightning),)}
    )


def parameters(config: Config) -> int:
    """Lightning layers have q, k, v, a gate and a norm over all heads; every layer has experts and
    two norms.
    """
    hidden, made = count(config, "hidden_size"), embeddings(config)
    mlp = experts(hidden, count(config, "intermediate_size"), count(config, "num_local_experts"))
    for layer in layers_of(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, Lightning):
            inner = kind.num_heads * kind.head_dim
            made += 5 * hidden * inner + inner
        else:
            made += attention(kind.attention)
        made += mlp + 2 * hidden
    return made


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    layers = count(config, "num_hidden_layers")

    def factors(word: str) -> tuple[float, float]:
        return float(config[f"{word}_alpha_factor"]), float(config[f"{word}_beta_factor"])

    moe = MoEOptions(
        layers=tuple(range(layers)),
        experts=count(config, "num_local_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=count(config, "intermediate_size"),
        normalise=True,
    )
    mixers = tuple(factors(WORDS[name]) for name in config["layer_types"][:layers])
    made = WeightedOptions(
        **decoder_options(config, moe=moe), mixer_factors=mixers, mlp_factors=factors("mlp")
    )
    return dict(vars(made))


FAMILY = replace(
    decoder(
        "minimax",
        defaults=DEFAULTS,
        spell=spell,
        layers=layers_of,
        parameters=parameters,
        options=options,
    ),
    model_types=("minimax", "minimax_text_01", "minimax_m1"),
    module="octavo.nn.weighted:WeightedDecoder",
    names=MIXTRAL_NAMES,
    repack=W_ONE_BY_ONE,
    ignored=(*IGNORED, r".*\.self_attn\.(?:slope_rate|query_decay|key_decay|diagonal_decay)"),
)
