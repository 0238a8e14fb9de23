"""Models that mix attention with state space layers, layer by layer or side by side: Jamba, Bamba,
Granite 4, Falcon-H1. Torch-free data.

Owns class defaults, the spellings of which layer is which, and tensor names. Nemotron-H and Zamba2
have files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.mamba.spec import Mamba
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import (
    DECODER,
    FULL,
    GATE_UP,
    IGNORED,
    LINEAR,
    decoder_options,
    layers_by_type,
    listed,
    planned,
    refuse,
    rotated_only,
)
from octavo.models.mamba import rank
from octavo.models.moe import ONE_BY_ONE
from octavo.models.weights import attention, embeddings, experts, gated_mlp, mamba, mamba2
from octavo.spec.family import Family, Rename
from octavo.spec.hybrid import HybridOptions
from octavo.spec.kind import PLANNING, Config, LayerSpec, count
from octavo.spec.moe import MoEOptions

HYBRID = "hybrid"
HYBRID_DECODER: Final = "octavo.nn.hybrid:HybridDecoder"

_BASE: Final = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_MAMBA2: Final = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
JAMBA: Final = {
    **_BASE,
    "vocab_size": 65536,
    "rms_norm_eps": 1e-6,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
BAMBA: Final = {**_BASE, **_MAMBA2, "attn_layer_indices": None}
FALCON_H1: Final = {
    **_BASE,
    **_MAMBA2,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "projectors_bias": False,
}
GRANITE: Final = {
    **_MAMBA2,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_multiplier": 1.0,
}


def jamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One layer in ``attn_layer_period`` is full attention without rotation; the others in Mamba's
    words.
    """
    refuse(config, {"hidden_act": ("silu",)})
    period, offset = count(config, "attn_layer_period"), count(config, "attn_layer_offset", 0)
    return {
        "layer_types": [
            FULL if index % period == offset else LINEAR
            for index in range(count(config, "num_hidden_layers"))
        ],
        "mamba_inner_size": count(config, "mamba_expand") * count(config, "hidden_size"),
        "mamba_dt_rank": rank(config, "mamba_dt_rank"),
        "rope_parameters": rotated_only(config),
    }


def jamba_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Attention as ``self_attn``, Mamba as ``mamba``."""
    words = {
        "intermediate_size": "mamba_inner_size",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "time_step_rank": "mamba_dt_rank",
        "use_bias": "mamba_proj_bias",
        "use_conv_bias": "mamba_conv_bias",
        "mixer_rms_eps": "rms_norm_eps",
    }
    named = {key: config[name] for key, name in words.items()}
    return layers_by_type(
        {**config, **named, "mixer_norm": "scale"},
        {FULL: (("self_attn", FullAttention),), LINEAR: (("mamba", Mamba),)},
    )


def jamba_sparse(config: Config) -> tuple[int, ...]:
    """Layers with experts: one of ``expert_layer_period``, if there is more than one expert."""
    period, offset = count(config, "expert_layer_period"), config["expert_layer_offset"]
    layers = range(count(config, "num_hidden_layers")) if count(config, "num_experts") > 1 else ()
    return tuple(index for index in layers if index % period == offset)


def jamba_options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    sparse = jamba_sparse(config)
    if not sparse:
        return decoder_options(config)
    moe = MoEOptions(
        layers=sparse,
        experts=count(config, "num_experts"),
        active=count(config, "num_experts_per_tok"),
        inner_size=count(config, "intermediate_size"),
    )
    return decoder_options(config, moe=moe)


def jamba_parameters(config: Config) -> int:
    """Norms also inside Mamba; experts in one layer of ``expert_layer_period``; two norms per
    layer.
    """
    hidden, inner, made = (
        count(config, "hidden_size"),
        count(config, "intermediate_size"),
        embeddings(config),
    )
    sparse, number = jamba_sparse(config), count(config, "num_experts")
    conv, bias = bool(config["mamba_conv_bias"]), bool(config["mamba_proj_bias"])
    for layer in jamba_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, Mamba):
            made += mamba(kind, rank=kind.rank, conv_bias=conv, bias=bias, norms=True)
        else:
            made += attention(kind.attention)
        made += (
            experts(hidden, inner, number) if layer.index in sparse else gated_mlp(hidden, inner)
        ) + 2 * hidden
    return made


def head_size(config: Mapping[str, Any], inner: int | None = None) -> Mapping[str, Any]:
    """``mamba_d_head`` where it is ``auto`` or absent: what ``inner``, or ``mamba_expand``, leaves
    for each head.
    """
    if config.get("mamba_d_head") not in (None, "auto"):
        return {}
    inner, number = (
        inner or int(config["mamba_expand"] * count(config, "hidden_size")),
        count(config, "mamba_n_heads"),
    )
    if inner % number:
        raise ConfigError(
            f"mamba_n_heads {number} does not divide the {inner} channels of a Mamba layer"
        )
    return {"mamba_d_head": inner // number}


def scaled(config: Mapping[str, Any], name: str, *, width: int = 1) -> Mapping[str, Any]:
    """``query_pre_attn_scalar`` by which scores have the factor ``config[name]``, divided by the
    root of ``width``.

    Raises UnsupportedError naming the field unless it is positive.
    """
    if config.get(PLANNING):
        return {}
    factor = factor_of(config, name)
    if factor <= 0:
        raise UnsupportedError(f"{name} {factor} is not supported; only positive numbers are")
    return {"query_pre_attn_scalar": width * factor**-2}


def factor_of(config: Mapping[str, Any], name: str) -> float:
    """``config[name]``, 1 where it is absent. Raises ConfigError unless it is a number."""
    value = config.get(name, 1.0)
    if value is None:
        return 1.0
    if not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    return float(value)


def bamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``attn_layer_indices`` are full attention, with half of each head rotated, whatever the file
    says.
    """
    refuse(config, {"hidden_act": ("silu",)})
    full, layers = listed(config, "attn_layer_indices"), count(config, "num_hidden_layers")
    old = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return {
        **head_size(config),
        "layer_types": [FULL if index in full else LINEAR for index in range(layers)],
        "partial_rotary": True,
        "rope_parameters": {**(config.get("rope_parameters") or old), "partial_rotary_factor": 0.5},
    }


def granite_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``layer_types`` as they are; without them no layer attends. Rotation has to be asked for, and
    scores have a factor.
    """
    refuse(config, {"hidden_act": ("silu",)})
    rotated = config.get("position_embedding_type") == "rope"
    return {
        **head_size(config),
        **({} if rotated else {"rope_parameters": rotated_only(config)}),
        **scaled(config, "attention_multiplier"),
        "layer_types": config.get("layer_types") or [LINEAR] * count(config, "num_hidden_layers"),
    }


def falcon_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer has both mixers. Keys have a factor, which scores take instead: no key is cached
    with it.
    """
    refuse(config, {"hidden_act": ("silu",)})
    dim = config.get("head_dim") or count(config, "hidden_size") // count(
        config, "num_attention_heads"
    )
    return {
        **head_size(
            config, None if config["mamba_d_ssm"] is None else count(config, "mamba_d_ssm")
        ),
        **scaled(config, "key_multiplier", width=dim),
        "mamba_out_bias": config["projectors_bias"],
        "layer_types": [HYBRID] * count(config, "num_hidden_layers"),
    }


def bamba_options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(config, mlp_bias=bool(config.get("mlp_bias", False)))


def granite_options(config: Config) -> Mapping[str, Any]:
    """Options of ``HYBRID_DECODER``: experts with a shared one, or that alone, and factors."""
    shared, number = (
        count(config, "shared_intermediate_size"),
        count(config, "num_local_experts", 0),
    )
    moe = None
    if number:
        moe = MoEOptions(
            layers=tuple(range(count(config, "num_hidden_layers"))),
            experts=number,
            active=count(config, "num_experts_per_tok"),
            inner_size=count(config, "intermediate_size"),
            shared_size=shared,
            normalise=True,
        )
    usual = decoder_options(
        {**config, "intermediate_size": shared},
        moe=moe,
        embed_scale=factor_of(config, "embedding_multiplier"),
        logit_scale=1.0 / factor_of(config, "logits_scaling"),
    )
    options = HybridOptions(
        **usual, residual_scale=factor_of(config, "residual_multiplier"), shared_only=moe is None
    )
    return dict(vars(options))


def falcon_options(config: Config) -> Mapping[str, Any]:
    """Options of ``HYBRID_DECODER``: factors in every place (muP)."""
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    usual = decoder_options(
        config,
        mlp_bias=bool(config.get("mlp_bias", False)),
        embed_scale=factor_of(config, "embedding_multiplier"),
        logit_scale=factor_of(config, "lm_head_multiplier"),
    )
    options = HybridOptions(
        **usual,
        in_scales={"self_attn": factor_of(config, "attention_in_multiplier")},
        out_scales={
            "self_attn": factor_of(config, "attention_out_multiplier"),
            "mamba": factor_of(config, "ssm_out_multiplier"),
        },
        gate_scale=float(gate),
        down_scale=float(down),
    )
    return dict(vars(options))


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """Attention as ``self_attn``, Mamba-2 as ``mamba``; hybrid layers have both, which read the
    same input.
    """
    full, linear = ("self_attn", FullAttention), ("mamba", Mamba2)
    return layers_by_type(config, {FULL: (full,), LINEAR: (linear,), HYBRID: (full, linear)})


def parameters(config: Config) -> int:
    """Mixers of any layer, experts with a shared one (Granite) or MLPs, two norms per layer."""
    hidden, made = count(config, "hidden_size"), embeddings(config)
    bias = bool(config["mamba_proj_bias"])
    # Falcon-H1 has a key of its own for the output.
    out_bias = bool(config.get("projectors_bias", bias))
    options = {"conv_bias": bool(config["mamba_conv_bias"]), "bias": bias, "out_bias": out_bias}
    for layer in layers(config):
        made += 2 * hidden
        for _, kind in layer.mixers:
            if isinstance(kind, Mamba2):
                made += mamba2(kind, norm=bool(config.get("mamba_rms_norm", True)), **options)
            elif isinstance(kind, FullAttention):
                biased = bool(config.get("attention_bias", False))
                made += attention(kind.attention, bias=biased, out_bias=biased)
        if "shared_intermediate_size" not in config:
            made += gated_mlp(
                hidden, count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False))
            )
            continue
        number = count(config, "num_local_experts", 0)
        made += gated_mlp(hidden, count(config, "shared_intermediate_size"))
        made += experts(hidden, count(config, "intermediate_size"), number) if number else 0
    return made


_FEED_FORWARD: tuple[Rename, ...] = (
    (r"(model\.layers\.\d+)\.feed_forward\.router\.(.*)", r"\1.mlp.gate.\2"),
    (r"(model\.layers\.\d+)\.feed_forward\.(.*)", r"\1.mlp.\2"),
    (r"(.*)\.pre_ff_layernorm\.weight", r"\1.post_attention_layernorm.weight"),
    (r"model\.final_layernorm\.weight", r"model.norm.weight"),
)
_SHARED_MLP: tuple[Rename, ...] = (
    (r"(.*)\.block_sparse_moe\.router\.layer\.weight", r"\1.mlp.gate.weight"),
    (r"(.*)\.block_sparse_moe\.input_linear\.weight", r"\1.mlp.experts.gate_up_proj"),
    (r"(.*)\.block_sparse_moe\.output_linear\.weight", r"\1.mlp.experts.down_proj"),
    (r"(.*)\.shared_mlp\.input_linear\.weight", r"\1.mlp.shared_experts.gate_up_proj.weight"),
    (r"(.*)\.shared_mlp\.output_linear\.weight", r"\1.mlp.shared_experts.down_proj.weight"),
)


def _family(name: str, module: str, **fields: Any) -> Family:
    beside = {key: fields.pop(key) for key in ("options", "names", "repack") if key in fields}
    return replace(planned(name, **fields), module=module, ignored=IGNORED, **beside)


FAMILIES = (
    _family(
        "jamba",
        DECODER,
        defaults=JAMBA,
        spell=jamba_spell,
        layers=jamba_layers,
        parameters=jamba_parameters,
        options=jamba_options,
        names=_FEED_FORWARD,
        repack=ONE_BY_ONE,
    ),
    _family(
        "bamba",
        DECODER,
        defaults=BAMBA,
        spell=bamba_spell,
        layers=layers,
        parameters=parameters,
        options=bamba_options,
        names=_FEED_FORWARD,
    ),
    _family(
        "granitemoehybrid",
        HYBRID_DECODER,
        defaults=GRANITE,
        spell=granite_spell,
        layers=layers,
        parameters=parameters,
        options=granite_options,
        names=_SHARED_MLP,
        repack=(GATE_UP,),
    ),
    _family(
        "falcon_h1",
        HYBRID_DECODER,
        defaults=FALCON_H1,
        spell=falcon_spell,
        layers=layers,
        parameters=parameters,
        options=falcon_options,
        names=_FEED_FORWARD,
    ),
)
