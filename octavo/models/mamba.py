"""Models that are nothing but state space layers: Mamba, Falcon Mamba, Mamba-2. Planned for. Torch-free data.

Owns class defaults. Their configs set no limit to the context, and octavo's own is as far as positions go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final

from octavo.kinds.mamba.spec import Mamba
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import LINEAR, layers_by_type, planned
from octavo.models.weights import embeddings, mamba, mamba2, mixers
from octavo.spec.kind import Config, Kind, LayerSpec, count

NO_LIMIT: Final = 2**31 - 1
"""Context of a model whose config does not limit it: positions are int32."""

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
    "tie_word_embeddings": True,
    "max_position_embeddings": NO_LIMIT,
}
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
    "tie_word_embeddings": False,
    "max_position_embeddings": NO_LIMIT,
}


def mamba_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer alike. A given ``intermediate_size`` holds: Falcon Mamba's ``expand`` is not what its weights have."""
    inner = config.get("intermediate_size") or int(config["expand"] * count(config, "hidden_size"))
    return {"intermediate_size": inner, "layer_types": [LINEAR] * count(config, "num_hidden_layers")}


def mamba2_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer alike, in Bamba's words."""
    words = {
        "num_heads": "n_heads",
        "head_dim": "d_head",
        "n_groups": "n_groups",
        "state_size": "d_state",
        "conv_kernel": "d_conv",
    }
    named = {f"mamba_{name}": config[key] for key, name in words.items()}
    return {**named, "layer_types": [LINEAR] * count(config, "num_hidden_layers")}


def layers(kind: type[Kind]) -> Callable[[Config], tuple[LayerSpec, ...]]:
    """One mixer ``mixer`` per layer."""
    return lambda config: layers_by_type(config, {LINEAR: (("mixer", kind),)})


def rank(config: Config, name: str = "time_step_rank") -> int:
    """Rank of the time steps; ``auto`` is a sixteenth of the hidden size."""
    return ceil(count(config, "hidden_size") / 16) if config[name] == "auto" else count(config, name)


def mamba_parameters(config: Config) -> int:
    """Mixers and a norm each."""
    conv, bias = bool(config["use_conv_bias"]), bool(config["use_bias"])
    kinds: Any = mixers(layers(Mamba)(config))
    made = sum(mamba(kind, rank=rank(config), conv_bias=conv, bias=bias) + kind.hidden_size for kind in kinds)
    return embeddings(config) + made


def mamba2_parameters(config: Config) -> int:
    """Mixers and a norm each."""
    conv, bias = bool(config["use_conv_bias"]), bool(config["use_bias"])
    kinds: Any = mixers(layers(Mamba2)(config))
    return embeddings(config) + sum(mamba2(kind, conv_bias=conv, bias=bias, out_bias=bias) + kind.hidden_size for kind in kinds)


FAMILIES = (
    planned(
        "mamba",
        aliases=("falcon_mamba",),
        defaults=MAMBA,
        spell=mamba_spell,
        layers=layers(Mamba),
        parameters=mamba_parameters,
    ),
    planned("mamba2", defaults=MAMBA2, spell=mamba2_spell, layers=layers(Mamba2), parameters=mamba2_parameters),
)
