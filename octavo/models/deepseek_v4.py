"""DeepSeek-V4: windows beside compressed entries, sparse and heavy. Planned for. Torch-free data.

Owns class defaults, and the reading of ``compress_ratios`` and ``layer_types``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
from octavo.kinds.v4_csa.spec import V4CompressedSparse
from octavo.kinds.v4_hca.spec import V4HeavilyCompressed
from octavo.kinds.v4_window.spec import V4Window
from octavo.models.common import SLIDING, layers_by_type, planned
from octavo.models.weights import embeddings, experts, gated_mlp
from octavo.spec.kind import Config, Kind, LayerSpec, count

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
}


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both ``layer_types`` and ``compress_ratios`` from either, and the rotated size.

    Raises UnsupportedError without either: no schedule of a released model follows from the class defaults. Ratios other than
    0, 4 and 128 need ``layer_types`` and ``compress_rates``.
    """
    types, ratios = config.get("layer_types"), config.get("compress_ratios")
    rates = {SPARSE: 4, HEAVY: 128, SLIDING: 0, **(config.get("compress_rates") or {})}
    if types is None:
        if ratios is None:
            raise UnsupportedError(
                "compress_ratios and layer_types are missing; a DeepSeek-V4 config says which layers compress"
            )
        if not isinstance(ratios, list | tuple) or any(ratio not in TYPES for ratio in ratios):
            raise ConfigError(f"compress_ratios must be a list of {', '.join(map(str, TYPES))}; other ratios need layer_types")
        types, rates = [TYPES[ratio] for ratio in ratios], {name: ratio for ratio, name in TYPES.items()}
    rotated = config.get("qk_rope_head_dim") or int(config["head_dim"] * config.get("partial_rotary_factor", 0.125))
    return {"layer_types": types, "compress_ratios": [rates.get(name, 0) for name in types], "qk_rope_head_dim": rotated}


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``attn`` per layer; the trailing entry of the drafting layer is none."""
    kinds: dict[str, type[Kind]] = {SLIDING: V4Window, SPARSE: V4CompressedSparse, HEAVY: V4HeavilyCompressed}
    return layers_by_type(config, {name: (("attn", kind),) for name, kind in kinds.items()})


def parameters(config: Config) -> int:
    """Attention with low-rank queries and grouped low-rank output, compressors, hyper-connections, experts."""
    hidden, heads, dim = (count(config, name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
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
            made += compressor(hidden, dim, kind.ratio, 2) + compressor(hidden, kind.index_dim, kind.ratio, 2)
            made += rank * kind.index_heads * kind.index_dim + hidden * kind.index_heads
    return made


def compressor(hidden: int, dim: int, ratio: int, width: int) -> int:
    """Values, gates and positions of ``width`` projections, and the norm of an entry."""
    return width * dim * (2 * hidden + ratio) + dim


FAMILIES = (planned("deepseek_v4", defaults=DEFAULTS, spell=spell, layers=layers, parameters=parameters),)
