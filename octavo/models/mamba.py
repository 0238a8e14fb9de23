"""Models that are nothing but state space layers: Mamba, Falcon Mamba, Mamba-2. Torch-free data.

Owns class defaults. Their configs set no limit to the context, and octavo's own is as far as
positions go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, Final

from octavo.kinds.mamba.spec import Mamba
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import LINEAR, layers_by_type, planned, refuse
from octavo.models.weights import embeddings, mamba, mamba2, mixers
from octavo.spec.hybrid import PLAIN_ACTIVATION, SoloOptions
from octavo.spec.kind import Config, Kind, LayerSpec, count

NO_LIMIT: Final = 2**31 - 1
"""Context of a model whose config does not limit it: positions are int32."""

SOLO: Final = "octavo.nn.hybrid:SoloDecoder"

MAMBA: Final = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": "auto",
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": NO_LIMIT,
}
FALCON_MAMBA: Final = {**MAMBA, "mixer_rms_eps": 1e-6}
MAMBA2: Final = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "num_hidden_layers": 64,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": NO_LIMIT,
}


def mamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer alike. A given ``intermediate_size`` holds: Falcon Mamba's ``expand`` is not what
    its weights have.
    """
    refuse(config, {"hidden_act": ("silu",)})
    inner = config.get("intermediate_size") or int(config["expand"] * count(config, "hidden_size"))
    return {
        "intermediate_size": inner,
        "time_step_rank": rank(config),
        "layer_types": [LINEAR] * count(config, "num_hidden_layers"),
    }


def falcon_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Time steps, B and C are normed without weights."""
    return {**mamba_spell(config), "mixer_norm": "unit"}


def mamba2_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer alike, in Bamba's words."""
    refuse(config, {"hidden_act": ("silu",)})
    words = {
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    named = {name: config[key] for name, key in words.items()}
    return {**named, "layer_types": [LINEAR] * count(config, "num_hidden_layers")}


def layers(kind: type[Kind]) -> Callable[[Config], tuple[LayerSpec, ...]]:
    """One mixer ``mixer`` per layer."""
    return lambda config: layers_by_type(config, {LINEAR: (("mixer", kind),)})


def rank(config: Mapping[str, Any], name: str = "time_step_rank") -> int:
    """Rank of the time steps; ``auto`` is a sixteenth of the hidden size."""
    return (
        ceil(count(config, "hidden_size") / 16) if config[name] == "auto" else count(config, name)
    )


def mamba_parameters(config: Config) -> int:
    """Mixers and a norm each."""
    conv, bias = bool(config["use_conv_bias"]), bool(config["use_bias"])
    kinds: Any = mixers(layers(Mamba)(config))
    made = sum(
        mamba(kind, rank=kind.rank, conv_bias=conv, bias=bias) + kind.hidden_size for kind in kinds
    )
    return embeddings(config) + made


def mamba2_parameters(config: Config) -> int:
    """Mixers and a norm each."""
    conv, bias = bool(config["use_conv_bias"]), bool(config["use_bias"])
    kinds: Any = mixers(layers(Mamba2)(config))
    return embeddings(config) + sum(
        mamba2(kind, conv_bias=conv, bias=bias, out_bias=bias) + kind.hidden_size for kind in kinds
    )


def options(config: Config) -> Mapping[str, Any]:
    """Options of ``SOLO``; there are no MLPs."""
    solo = SoloOptions(
        hidden_size=count(config, "hidden_size"),
        intermediate_size=0,
        activation=PLAIN_ACTIVATION,
        norm_eps=float(config["layer_norm_epsilon"]),
        tied_embeddings=bool(config["tie_word_embeddings"]),
        wide_residual=bool(config["residual_in_fp32"]),
    )
    return dict(vars(solo))


_mamba = partial(planned, layers=layers(Mamba), parameters=mamba_parameters)
_run = partial(
    replace,
    module=SOLO,
    options=options,
    names=(
        # The first is how models are named that were saved before Transformers had the class.
        (r"backbone\.embedding\.weight", r"model.embed_tokens.weight"),
        (r"backbone\.embeddings\.weight", r"model.embed_tokens.weight"),
        (r"backbone\.norm_f\.weight", r"model.norm.weight"),
        (r"backbone\.layers\.(.*)", r"model.layers.\1"),
    ),
)
FAMILIES = (
    _run(_mamba("mamba", defaults=MAMBA, spell=mamba_spell)),
    _run(_mamba("falcon_mamba", defaults=FALCON_MAMBA, spell=falcon_spell)),
    _run(
        planned(
            "mamba2",
            defaults=MAMBA2,
            spell=mamba2_spell,
            layers=layers(Mamba2),
            parameters=mamba2_parameters,
        )
    ),
)
