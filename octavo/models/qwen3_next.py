"""Qwen3-Next and Qwen3.5, the latter's text model: gated delta nets, and full attention with gates.
Torch-free data.

Owns class defaults, which layer is which, and its checkpoints' own names. Rotation by three
coordinates is by one in text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.kinds.full.spec import FullAttention
from octavo.kinds.gated_delta_net.spec import GatedDeltaNet
from octavo.models.common import (
    FULL,
    IGNORED,
    LINEAR,
    decoder,
    decoder_options,
    every,
    layers_by_type,
)
from octavo.models.moe import ONE_BY_ONE
from octavo.models.qwen3_moe import sparse_layers
from octavo.models.weights import attention, embeddings, experts, gated_delta_net, gated_mlp
from octavo.spec.family import Family, Rename
from octavo.spec.kind import Config, LayerSpec, count
from octavo.spec.moe import MoEOptions

_DELTA: Final = {
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_EXPERTS: Final = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
QWEN3_NEXT: Final = {
    **_DELTA,
    **_EXPERTS,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
QWEN3_5: Final = {
    **_DELTA,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_experts": 0,
}
QWEN3_5_MOE: Final = {
    **_DELTA,
    **_EXPERTS,
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

COORDINATES: Final = frozenset({"mrope_section", "mrope_interleaved"})
"""Entries of ``rope_parameters`` that say which coordinate of an image turns which wave: no matter
in text, where all agree.
"""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One layer in ``full_attention_interval`` is full. Norms are centred on one but for those of
    the delta nets.
    """
    made: dict[str, Any] = {
        "layer_types": config.get("layer_types")
        or every(config, config["full_attention_interval"], FULL, LINEAR),
        "qk_norm": "offset",
        "gated": True,
        "partial_rotary": True,
        "intermediate_size": config.get("intermediate_size", 0),
    }
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), Mapping):
            made[name] = {
                key: value for key, value in config[name].items() if key not in COORDINATES
            }
    return made


def packed_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Projections of the delta nets lie key head after key head."""
    return {**spell(config), "linear_packed": True}


def delta_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Full attention as ``self_attn``, gated delta nets as ``linear_attn``."""
    return layers_by_type(
        config, {FULL: (("self_attn", FullAttention),), LINEAR: (("linear_attn", GatedDeltaNet),)}
    )


def parameters(config: Config) -> int:
    """Gated attention with head norms, delta nets; MLPs or experts with a gated shared one; two
    norms per layer.
    """
    hidden, number, made = (
        count(config, "hidden_size"),
        count(config, "num_experts", 0),
        embeddings(config),
    )
    sparse = sparse_layers(config)
    for layer in delta_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, GatedDeltaNet):
            made += gated_delta_net(kind)
        else:
            biased = bool(config.get("attention_bias", False))
            made += attention(
                kind.attention,
                gate=True,
                norms=2 * kind.attention.head_dim,
                bias=biased,
                out_bias=biased,
            )
        if layer.index in sparse:
            made += experts(hidden, count(config, "moe_intermediate_size"), number) + hidden
            made += gated_mlp(hidden, count(config, "shared_expert_intermediate_size"))
        else:
            made += gated_mlp(hidden, count(config, "intermediate_size"))
        made += 2 * hidden
    return made


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    sparse, moe = sparse_layers(config), None
    if sparse:
        moe = MoEOptions(
            layers=sparse,
            experts=count(config, "num_experts"),
            active=count(config, "num_experts_per_tok"),
            inner_size=count(config, "moe_intermediate_size"),
            shared_size=count(config, "shared_expert_intermediate_size"),
            shared_gate=True,
            normalise=bool(config["norm_topk_prob"]),
        )
    return decoder_options(config, norm="offset", moe=moe)


NAMES: Final[tuple[Rename, ...]] = (
    (r"(?:model\.language_model|model)\.(.*)\.shared_expert\.(.*)", r"model.\1.shared_experts.\2"),
    (r"model\.language_model\.(.*)", r"model.\1"),
)
"""One name of shared experts for all families; the text model's part of multimodal checkpoints."""


def _qwen(
    name: str, *, aliases: tuple[str, ...] = (), defaults: Mapping[str, Any], packed: bool = False
) -> Family:
    family = decoder(
        name,
        aliases=aliases,
        defaults=defaults,
        spell=packed_spell if packed else spell,
        layers=delta_layers,
        parameters=parameters,
        options=options,
    )
    return replace(
        family,
        names=NAMES,
        repack=ONE_BY_ONE,
        ignored=(*IGNORED, r"mtp\..*", r"(?:model\.)?visual\..*"),
    )


FAMILIES = (
    _qwen("qwen3_next", defaults=QWEN3_NEXT, packed=True),
    _qwen("qwen3_5_text", aliases=("qwen3_5",), defaults=QWEN3_5),
    _qwen("qwen3_5_moe_text", aliases=("qwen3_5_moe",), defaults=QWEN3_5_MOE),
)
