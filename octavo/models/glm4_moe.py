"""GLM-4.5: heads rotated in part, experts chosen by DeepSeek-V3's rule behind the first dense
layers. Torch-free data.

Owns class defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.models.common import decoder, decoder_options, typed_layers
from octavo.models.moe import ONE_BY_ONE, behind_dense, corrected, heads, routed
from octavo.models.weights import embeddings
from octavo.models.windowed import full_everywhere
from octavo.spec.kind import Config

DEFAULTS: Final = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
"""What Transformers' Glm4MoeConfig takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is full; the output has no bias, and heads of q and k norms only with
    ``use_qk_norm``.
    """
    norm = "scale" if config["use_qk_norm"] else None
    return {**full_everywhere(config), "partial_rotary": True, "out_bias": False, "qk_norm": norm}


def parameters(config: Config) -> int:
    """Experts and a shared one behind the first ``first_k_dense_replace`` layers."""
    layers = typed_layers(config)
    norms = 2 * layers[0].mixers[0][1].attention.head_dim if config.get("use_qk_norm") else 0  # type: ignore[attr-defined]
    return embeddings(config) + heads(config, layers, norms=norms) + routed(config, len(layers))


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(config, moe=corrected(config, behind_dense(config)))


FAMILY = replace(
    decoder("glm4_moe", defaults=DEFAULTS, spell=spell, parameters=parameters, options=options),
    repack=ONE_BY_ONE,
    drafts=r"model\.layers\.(\d+)\..*",
)
