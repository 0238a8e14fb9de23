"""The tiny echo family: a plain decoder that mixes echo layers with full attention. Torch-free
data.

A plugin module: ``KINDS`` and ``FAMILIES`` are what octavo looks for. Owns the family's defaults
and refusals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from octavo.base import UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.spec.decoder import DecoderOptions
from octavo.spec.family import Family
from octavo.spec.kind import Config, Kind, LayerSpec
from tests.plugins.echo.spec import LAYER_TYPE, Echo

FULL = "full_attention"

DEFAULTS: Final = {
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "qk_norm": None,
}
"""What holds where the file is silent."""


def normalize(config: Config) -> Config:
    """Defaults filled in; a config without ``layer_types`` is refused."""
    if not config.get("layer_types"):
        raise UnsupportedError(
            "layer_types is missing; a tiny_echo model names the type of every layer"
        )
    return {**DEFAULTS, **config}


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer, by ``layer_types``."""
    return tuple(
        LayerSpec(index=index, mixers=(("self_attn", _kind(config, name, index)),))
        for index, name in enumerate(config["layer_types"])
    )


def _kind(config: Config, name: str, index: int) -> Kind:
    if name == LAYER_TYPE:
        return Echo.from_hf(config, index)
    if name == FULL:
        return FullAttention.from_hf(config, index)
    raise UnsupportedError(
        f"layer_types[{index}] {name!r} is not supported; supported: {FULL}, {LAYER_TYPE}"
    )


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return asdict(
        DecoderOptions(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            activation=config["hidden_act"],
            norm_eps=float(config["rms_norm_eps"]),
            tied_embeddings=bool(config["tie_word_embeddings"]),
        )
    )


KINDS = (Echo,)

FAMILIES = (
    Family(
        name="tiny_echo",
        model_types=("tiny_echo",),
        normalize=normalize,
        layers=layers,
        options=options,
        module="octavo.nn.decoder:Decoder",
        names=(),
    ),
)
