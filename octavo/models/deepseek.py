"""DeepSeek-V2, V3 and V3.2, Kimi K2, GLM-5: latent attention, with and without an indexer.
Torch-free data.

Owns class defaults, which layers have an indexer of their own, and how experts are chosen. Modules
are called alike in official checkpoints and in those of Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
from octavo.kinds.dsa.spec import SparseLatent
from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.models.common import decoder, decoder_options, layers_by_type, listed, refuse
from octavo.models.moe import ONE_BY_ONE, behind_dense, corrected, routed
from octavo.models.weights import embeddings, indexer, latent_attention
from octavo.spec.family import Family
from octavo.spec.kind import PLANNING, Config, LayerSpec, count
from octavo.spec.moe import MoEOptions

LATENT, INDEXED = "latent_attention", "indexed_attention"

_PLAIN: Final = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_SHAPES: Final = {
    **_PLAIN,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_NOAUX: Final = {"num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
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
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V3: Final = {
    **_SHAPES,
    **_NOAUX,
    "n_group": 8,
    "topk_group": 4,
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
V32: Final = {
    **V3,
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
GLM: Final = {
    **_PLAIN,
    **_NOAUX,
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
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


def _refuse(config: Config, *, method: str, scoring: str) -> None:
    """Raise UnsupportedError or ConfigError for the first field that no model of these classes
    has.
    """
    refuse(config, {"mlp_bias": (False,), "moe_layer_freq": (1,), "scoring_func": (scoring,)})
    methods = {"noaux_tc": ("noaux_tc",), "greedy": ("greedy", "group_limited_greedy")}[method]
    refuse(
        config,
        {"topk_method": methods, **({"norm_topk_prob": (False,)} if method == "greedy" else {})},
    )
    if config.get("mlp_layer_types") is None or config.get(PLANNING):
        return
    layers = count(config, "num_hidden_layers")
    dense = min(count(config, "first_k_dense_replace", 0), layers)
    if listed(config, "mlp_layer_types")[:layers] != ["dense"] * dense + ["sparse"] * (
        layers - dense
    ):
        raise UnsupportedError(
            f"mlp_layer_types are only supported as first_k_dense_replace {dense} makes them"
        )


def v2_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is of one type; neighbours rotate against each other."""
    _refuse(config, method="greedy", scoring="softmax")
    return {
        "layer_types": [LATENT] * count(config, "num_hidden_layers"),
        "interleaved_rotary": True,
    }


def v3_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is of one type; ``rope_interleave`` says what rotates against each other."""
    _refuse(config, method="noaux_tc", scoring="sigmoid")
    interleaved = bool(config.get("rope_interleave", True))
    return {
        "layer_types": [LATENT] * count(config, "num_hidden_layers"),
        "interleaved_rotary": interleaved,
    }


def indexed_spell(config: Mapping[str, Any], *, interleaved: bool) -> Mapping[str, Any]:
    """Every layer is indexed; GLM says which share: a list, a pattern such as ``FSSF``, or by
    frequency behind an offset.

    interleaved: in index keys too, neighbours rotate against each other.
    Raises ConfigError where a layer has no or an unknown indexer type, or the first would share
    what is not there.
    """
    _refuse(config, method="noaux_tc", scoring="sigmoid")
    refuse(config, {"rope_interleave": (True,), "indexer_rope_interleave": (interleaved,)})
    layers = count(config, "num_hidden_layers")
    letters, types = {"F": "full", "S": "shared"}, listed(config, "indexer_types")
    pattern = config.get("index_topk_pattern")
    types = types or (
        list(pattern) if isinstance(pattern, str) else listed(config, "index_topk_pattern")
    )
    if not types:
        period, offset = (
            max(config.get("index_topk_freq") or 1, 1),
            config.get("index_skip_topk_offset", 2),
        )
        types = [
            "shared" if max(index - offset + 1, 0) % period else "full" for index in range(layers)
        ]
    types = [letters.get(name, name) for name in types]
    if len(types) < layers:
        raise ConfigError(
            f"indexer_types names {len(types)} layers, num_hidden_layers says {layers}"
        )
    for index, name in enumerate(types[:layers]):
        if name not in letters.values():
            raise ConfigError(f"indexer_types[{index}] {name!r} is neither full nor shared")
    if types[0] == "shared":
        raise ConfigError("indexer_types[0] is shared, but no layer before it has an indexer")
    rotation = {"interleaved_rotary": True, "index_interleaved": interleaved}
    return {"layer_types": [INDEXED] * layers, "indexer_types": types, **rotation}


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer."""
    return layers_by_type(
        config, {LATENT: (("self_attn", MultiHeadLatent),), INDEXED: (("self_attn", SparseLatent),)}
    )


def parameters(config: Config) -> int:
    """Latent attention and indexers, dense and routed MLPs, two norms per layer."""
    made, hidden = embeddings(config), count(config, "hidden_size")
    specs = layers(config)
    for layer in specs:
        kind: Any = layer.mixers[0][1]
        made += latent_attention(kind.latent) + 2 * hidden
        made += indexer(kind) if isinstance(kind, SparseLatent) else 0
    return made + routed(config, len(specs))


def v2_options(config: Config) -> Mapping[str, Any]:
    """Softmax scores as they are; groups, where they count, by their best expert (DeepSeek-V2,
    section 2.2.2).
    """
    sparse, inner = behind_dense(config), count(config, "moe_intermediate_size")
    if not sparse:
        return decoder_options(config)
    spread = config["topk_method"] == "group_limited_greedy"
    moe = MoEOptions(
        layers=sparse,
        experts=count(config, "n_routed_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=inner,
        shared_size=inner * count({"n_shared_experts": 0, **config}, "n_shared_experts", 0),
        scale=float(config["routed_scaling_factor"]),
        groups=count(config, "n_group") if spread else 1,
        active_groups=count(config, "topk_group") if spread else 1,
        group_best=1,
        wide_router=True,
    )
    return decoder_options(config, moe=moe)


def v3_options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(config, moe=corrected(config, behind_dense(config)))


def _family(
    name: str,
    defaults: Mapping[str, Any],
    spell: Callable[[dict[str, Any]], Mapping[str, Any]],
    *,
    options: Callable[[Config], Mapping[str, Any]] = v3_options,
    aliases: tuple[str, ...] = (),
) -> Family:
    made = decoder(
        name,
        defaults=defaults,
        parameters=parameters,
        spell=spell,
        layers=layers,
        options=options,
        aliases=aliases,
    )
    return replace(made, repack=ONE_BY_ONE, drafts=r"model\.layers\.(\d+)\..*")


FAMILIES = (
    _family("deepseek_v2", V2, v2_spell, options=v2_options),
    _family("deepseek_v3", V3, v3_spell, aliases=("kimi_k2",)),
    _family("deepseek_v32", V32, partial(indexed_spell, interleaved=False)),
    _family("glm_moe_dsa", GLM, partial(indexed_spell, interleaved=True)),
)
