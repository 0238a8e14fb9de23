"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, an MLP or experts, one thing each.
Torch-free data.

Owns class defaults, the spellings of which layer is which, and tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import FULL, LINEAR, Mixers, layers_by_type, planned, refuse, rotated_only
from octavo.models.mamba import SOLO
from octavo.models.moe import corrected
from octavo.models.weights import attention, embeddings, mamba2
from octavo.spec.family import Repack
from octavo.spec.hybrid import SoloOptions
from octavo.spec.kind import Config, LayerSpec, count

MLP, MOE = "mlp", "moe"

DEFAULTS: Final = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
"""What Transformers' NemotronHConfig takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``layers_block_type``, or a pattern of M (Mamba-2), E (experts), - (MLP) and * (attention),
    in Bamba's words.

    Attention is not rotated and has no bias. Transformers clamps time steps from below by
    ``time_step_min`` in prompts, and not while decoding; here they are not, as ``time_step_limit``
    says, so that cutting a prompt changes nothing.
    """
    refuse(config, {"mamba_hidden_act": ("silu",), "sliding_window": ()})
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None:
        pattern, letters = (
            config.get("hybrid_override_pattern", "ME*-"),
            {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP},
        )
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(letters):
            raise ConfigError(
                f"hybrid_override_pattern must be of the letters {''.join(letters)}, not"
                f" {pattern!r}"
            )
        types = [letters[letter] for letter in pattern]
    words = {"mamba_num_heads": "n_heads", "mamba_head_dim": "d_head", "ssm_state_size": "d_state"}
    named = {f"mamba_{name}": config[key] for key, name in words.items()}
    return {
        **named,
        "mamba_n_groups": config.get("mamba_n_groups", config["n_groups"]),
        "mamba_d_conv": config.get("mamba_d_conv", config["conv_kernel"]),
        "mamba_conv_bias": config.get("mamba_conv_bias", config["use_conv_bias"]),
        "mamba_proj_bias": config["use_bias"],
        "time_step_limit": config.get("mamba_dt_limit", config.get("time_step_limit")),
        "rms_norm_eps": config["layer_norm_epsilon"],
        "attention_bias": False,
        "rope_parameters": rotated_only(config),
        "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        "layer_types": types,
        "num_hidden_layers": config.get("num_hidden_layers") or len(types),
    }


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``mixer`` per layer; layers of experts or an MLP mix no tokens."""
    mixers: dict[str, Mixers] = {
        FULL: (("mixer", FullAttention),),
        LINEAR: (("mixer", Mamba2),),
        MLP: (),
        MOE: (),
    }
    return layers_by_type(config, mixers)


def options(config: Config) -> Mapping[str, Any]:
    """Options of ``SOLO``. Raises UnsupportedError where experts would have biases."""
    types = config["layer_types"][: count(config, "num_hidden_layers")]
    sparse = tuple(index for index, name in enumerate(types) if name == MOE)
    if sparse and config["mlp_bias"]:
        raise UnsupportedError("mlp_bias True is not supported in models with experts")
    shared = count(config, "moe_shared_expert_intermediate_size") if sparse else 0
    latent = config.get("moe_latent_size") or 0
    moe = corrected(config, sparse, shared_size=shared, gated=False, latent_size=latent)
    solo = SoloOptions(
        hidden_size=count(config, "hidden_size"),
        intermediate_size=count(config, "intermediate_size"),
        activation=config["mlp_hidden_act"],
        norm_eps=float(config["layer_norm_epsilon"]),
        norm="wide",
        tied_embeddings=bool(config["tie_word_embeddings"]),
        mlp_bias=bool(config["mlp_bias"]),
        moe=moe,
    )
    return dict(vars(solo))


def parameters(config: Config) -> int:
    """One mixer, MLP or set of experts (without gates) and one norm per layer."""
    hidden, made, types = count(config, "hidden_size"), embeddings(config), config["layer_types"]
    bias = bool(config.get("mlp_bias", False))
    for layer in layers(config):
        made += hidden
        kind: Any = layer.mixers[0][1] if layer.mixers else None
        if isinstance(kind, Mamba2):
            proj = bool(config.get("use_bias", False))
            made += mamba2(kind, conv_bias=bool(config["use_conv_bias"]), bias=proj, out_bias=proj)
        elif kind is not None:
            made += attention(kind.attention)
        elif types[layer.index] == MOE:
            made += expert_weights(config, hidden)
        else:
            inner = count(config, "intermediate_size")
            made += 2 * hidden * inner + (inner + hidden if bias else 0)
    return made


def expert_weights(config: Config, hidden: int) -> int:
    """Up and down of every expert, in the latent size if there is one, the router, and a shared
    expert.
    """
    number, latent = count(config, "n_routed_experts"), config.get("moe_latent_size")
    made = (
        2 * number * (latent or hidden) * count(config, "moe_intermediate_size") + number * hidden
    )
    made += 2 * hidden * latent if latent else 0
    return made + 2 * hidden * count(config, "moe_shared_expert_intermediate_size")


_EXPERTS: Final = r"(model\.layers\.\d+\.mixer\.experts)"

FAMILY = replace(
    planned("nemotron_h", defaults=DEFAULTS, spell=spell, layers=layers, parameters=parameters),
    module=SOLO,
    options=options,
    names=(
        (r"(?:backbone|model)\.embeddings\.weight", r"model.embed_tokens.weight"),
        (r"(?:backbone|model)\.norm_f\.weight", r"model.norm.weight"),
        (r"backbone\.layers\.(.*)", r"model.layers.\1"),
    ),
    ignored=(r"mtp\..*",),
    repack=(
        Repack(
            pattern=rf"{_EXPERTS}\.(\d+)\.up_proj\.weight", into=(r"\1.gate_up_proj",), index=r"\2"
        ),
        Repack(
            pattern=rf"{_EXPERTS}\.(\d+)\.down_proj\.weight", into=(r"\1.down_proj",), index=r"\2"
        ),
        Repack(pattern=rf"{_EXPERTS}\.up_proj", into=(r"\1.gate_up_proj",)),
    ),
)
