"""DeepSeek-V4: windows beside compressed entries, sparse and heavy; hyper-connections; experts by
token id. Torch-free data.

Owns class defaults, the reading of ``compress_ratios`` and ``layer_types``, and the names that
checkpoints have for tensors: Transformers' module names, what it writes, and DeepSeek's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
from octavo.kinds.v4_csa.spec import V4CompressedSparse
from octavo.kinds.v4_hca.spec import V4HeavilyCompressed
from octavo.kinds.v4_window.spec import V4Window
from octavo.models.common import (
    IGNORED,
    SLIDING,
    decoder_options,
    layers_by_type,
    listed,
    planned,
    refuse,
)
from octavo.models.moe import ONE_BY_ONE
from octavo.models.weights import embeddings, experts, gated_mlp
from octavo.spec.family import Rename
from octavo.spec.hyper import HyperOptions
from octavo.spec.kind import PLANNING, Config, Kind, LayerSpec, ModelSpec, count
from octavo.spec.moe import MoEOptions

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
TYPES: Final = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Layer types by the ratios that checkpoints have."""

DEFAULTS: Final = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hc_mult": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
}
"""What Transformers' DeepseekV4Config takes where the file is silent."""

HASH_LAYERS: Final = 3
"""How many layers have experts by token id, unless the file says."""

_IN: Final = r"(?:model\.)?layers\.(\d+)\."

_LEAVES: Final = (
    (r"attn_norm\.weight", r"input_layernorm.weight"),
    (r"ffn_norm\.weight", r"post_attention_layernorm.weight"),
    (r"hc_(attn|ffn)_(fn|base|scale)", r"\2_hc.\3"),
    (r"attn\.attn_sink", r"self_attn.sinks"),
    (r"attn\.(?:kv_)?norm\.weight", r"self_attn.kv_norm.weight"),
    (r"attn\.q_norm\.weight", r"self_attn.q_a_norm.weight"),
    (r"attn\.wkv\.weight", r"self_attn.kv_proj.weight"),
    (r"attn\.w(q|o)_(a|b)\.weight", r"self_attn.\2_\3_proj.weight"),
    (r"attn\.compressor\.w(kv|gate)\.weight", r"self_attn.compressor.\2_proj.weight"),
    (r"attn\.compressor\.norm\.weight", r"self_attn.compressor.kv_norm.weight"),
    (r"attn\.compressor\.ape", r"self_attn.compressor.position_bias"),
    (
        r"attn\.indexer\.compressor\.w(kv|gate)\.weight",
        r"self_attn.compressor.indexer.\2_proj.weight",
    ),
    (r"attn\.indexer\.compressor\.norm\.weight", r"self_attn.compressor.indexer.kv_norm.weight"),
    (r"attn\.indexer\.compressor\.ape", r"self_attn.compressor.indexer.position_bias"),
    (r"attn\.indexer\.wq_b\.weight", r"self_attn.compressor.indexer.q_b_proj.weight"),
    (
        r"attn\.indexer\.weights_proj\.weight",
        r"self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    (r"ffn\.gate\.bias", r"mlp.gate.e_score_correction_bias"),
    (r"ffn\.gate\.(weight|tid2eid)", r"mlp.gate.\2"),
    (r"ffn\.(experts\.\d+|shared_experts)\.w1\.weight", r"mlp.\2.gate_proj.weight"),
    (r"ffn\.(experts\.\d+|shared_experts)\.w2\.weight", r"mlp.\2.down_proj.weight"),
    (r"ffn\.(experts\.\d+|shared_experts)\.w3\.weight", r"mlp.\2.up_proj.weight"),
)
"""What DeepSeek calls the weights of a layer, and Transformers; what stands before is ``_IN``."""

NAMES: Final[tuple[Rename, ...]] = (
    (r"(?:model\.)?embed\.weight", r"model.embed_tokens.weight"),
    (r"(?:model\.)?head\.weight", r"lm_head.weight"),
    (r"norm\.weight", r"model.norm.weight"),
    (r"(?:model\.)?hc_head_(fn|base|scale)", r"model.hc_head.hc_\1"),
    *((f"{_IN}{theirs}", rf"model.layers.\1.{ours}") for theirs, ours in _LEAVES),
)

DRAFTS: Final = (r"(?:model\.)?mtp\..*",)
"""Tensors of what drafts, which is not run."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both ``layer_types`` and ``compress_ratios`` from either, the rotated size, and both
    rotations.

    Raises UnsupportedError without either: no schedule of a released model follows from the class
    defaults. Ratios other than 0, 4 and 128 need ``layer_types`` and ``compress_rates``.
    """
    types, ratios = config.get("layer_types"), config.get("compress_ratios")
    rates = {SPARSE: 4, HEAVY: 128, SLIDING: 0, **(config.get("compress_rates") or {})}
    if types is None:
        if ratios is None:
            raise UnsupportedError(
                "compress_ratios and layer_types are missing; a DeepSeek-V4 config says which"
                " layers compress"
            )
        if not isinstance(ratios, list | tuple) or any(ratio not in TYPES for ratio in ratios):
            raise ConfigError(
                f"compress_ratios must be a list of {', '.join(map(str, TYPES))}; other ratios need"
                " layer_types"
            )
        types, rates = (
            [TYPES[ratio] for ratio in ratios],
            {name: ratio for ratio, name in TYPES.items()},
        )
    refuse(
        config,
        {
            "hidden_act": ("silu",),
            "norm_topk_prob": (True,),
            "attention_bias": (False,),
            "mlp_bias": (False,),
        },
    )
    refuse(config, {"scoring_func": ("sqrtsoftplus",), "n_group": (1,)})
    rotated = config.get("qk_rope_head_dim") or int(
        config["head_dim"] * config.get("partial_rotary_factor", 0.125)
    )
    return {
        "layer_types": types,
        "compress_ratios": [rates.get(name, 0) for name in types],
        "qk_rope_head_dim": rotated,
        "rope_parameters": {} if config.get(PLANNING) else rotations(config),
        "interleaved_rotary": True,
    }


def rotations(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of layers without a compressor (``main``) and with one (``compress``).

    A file gives both, or one scaling, which is then that of ``compress`` only. YaRN's own factor of
    cos and sin is not used.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    main, scaled = given.get("main"), given.get("compress")
    if main is None or scaled is None:
        main = {"rope_theta": config["rope_theta"]}
        scaled = {**given, "rope_theta": config["compress_rope_theta"]}
    if scaled.get("rope_type", scaled.get("type")) == "yarn":
        scaled = {"attention_factor": 1.0, **scaled}
    # Which elements are rotated is what ``qk_rope_head_dim`` says.
    return {
        name: {**rope, "partial_rotary_factor": 1.0}
        for name, rope in (("main", main), ("compress", scaled))
    }


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer; the trailing entry of the drafting layer is none."""
    kinds: dict[str, type[Kind]] = {
        SLIDING: V4Window,
        SPARSE: V4CompressedSparse,
        HEAVY: V4HeavilyCompressed,
    }
    return layers_by_type(config, {name: (("self_attn", kind),) for name, kind in kinds.items()})


def parameters(config: Config) -> int:
    """Attention with low-rank queries and grouped low-rank output, compressors, hyper-connections,
    experts.
    """
    hidden, heads, dim = (
        count(config, name) for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    rank, groups, out = (count(config, name) for name in ("q_lora_rank", "o_groups", "o_lora_rank"))
    inner, streams = count(config, "moe_intermediate_size"), count(config, "hc_mult")
    mixing = (2 + streams) * streams
    attention = hidden * rank + rank + rank * heads * dim + hidden * dim + dim + heads
    attention += heads * dim * out + groups * out * hidden
    mlp = experts(hidden, inner, count(config, "n_routed_experts")) + gated_mlp(
        hidden, inner * count(config, "n_shared_experts", 0)
    )
    connections = 2 * (mixing * streams * hidden + mixing + 3)
    made = embeddings(config) + streams * streams * hidden + streams + 1
    for layer in layers(config):
        made += attention + mlp + connections + 2 * hidden
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, V4HeavilyCompressed):
            made += compressor(hidden, dim, kind.ratio, 1)
        elif isinstance(kind, V4CompressedSparse):
            made += compressor(hidden, dim, kind.ratio, 2) + compressor(
                hidden, kind.index_dim, kind.ratio, 2
            )
            made += rank * kind.index_heads * kind.index_dim + hidden * kind.index_heads
    return made


def compressor(hidden: int, dim: int, ratio: int, width: int) -> int:
    """Values, gates and positions of ``width`` projections, and the norm of an entry."""
    return width * dim * (2 * hidden + ratio) + dim


def hash_unit(config: Config) -> int:
    """Twice the tokens after which all groups are closed at once: 256 for the ratios of
    checkpoints, their logical block.

    A resume point there needs of compressors no more than the group that the next entry looks back
    at.
    """
    ratios = [ratio for ratio in config["compress_ratios"] if ratio]
    return 2 * lcm(*ratios) if ratios else ModelSpec.hash_unit


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder with hyper-connections: experts in all layers, in the first ones by
    token id.
    """
    every = tuple(range(count(config, "num_hidden_layers")))
    types = listed(config, "mlp_layer_types")
    first = config.get("num_hash_layers", HASH_LAYERS)
    by_id = tuple(i for i in every if (types[i] == "hash_moe" if i < len(types) else i < first))
    inner = count(config, "moe_intermediate_size")
    moe = MoEOptions(
        layers=every,
        experts=count(config, "n_routed_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=inner,
        shared_size=inner * count(config, "n_shared_experts", 0),
        scoring="sqrtsoftplus",
        normalise=True,
        scale=float(config["routed_scaling_factor"]),
        correction=True,
        wide_router=True,
        limit=float(config["swiglu_limit"]),
    )
    hashed = (
        replace(moe, layers=by_id, correction=False, table=count(config, "vocab_size"))
        if by_id
        else None
    )
    plain = decoder_options({**config, "intermediate_size": inner}, norm="wide", moe=moe)
    made = HyperOptions(
        **plain,
        streams=count(config, "hc_mult"),
        rounds=count(config, "hc_sinkhorn_iters"),
        floor=float(config["hc_eps"]),
        hashed=hashed,
    )
    return dict(vars(made))


FAMILY = replace(
    planned("deepseek_v4", defaults=DEFAULTS, spell=spell, layers=layers, parameters=parameters),
    module="octavo.nn.hyper:HyperDecoder",
    options=options,
    hash_unit=hash_unit,
    names=NAMES,
    ignored=(*IGNORED, *DRAFTS),
    repack=ONE_BY_ONE,
)
