"""SmolLM3: every fourth layer is not rotated. Torch-free data.

Owns class defaults, which layers are rotated, and that a window, if used, is that of layers that
are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ConfigError
from octavo.models.common import (
    FULL,
    SLIDING,
    decoder,
    decoder_options,
    every,
    listed,
    typed_layers,
)
from octavo.models.weights import biased, dense
from octavo.spec.kind import Config, LayerSpec, count

DEFAULTS: Final = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}
"""What Transformers' SmolLM3Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``no_rope_layers``, which says 1 of layers that are rotated, and ``layer_types``.

    Raises ConfigError where layers are missing of the former.
    """
    layers = count(config, "num_hidden_layers")
    rotated = listed(config, "no_rope_layers") or [
        int(bool(name)) for name in every(config, config["no_rope_layer_interval"], "", "1")
    ]
    if len(rotated) < layers:
        raise ConfigError(
            f"no_rope_layers names {len(rotated)} layers, num_hidden_layers says {layers}"
        )
    windowed = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    types = [SLIDING if windowed and not rotated[index] else FULL for index in range(layers)]
    return {
        "no_rope_layers": rotated,
        "layer_types": config.get("layer_types") or types,
        "qk_norm": None,
    }


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """Layers by type, rotated or not by ``no_rope_layers``."""
    turned, still = (
        typed_layers(config),
        typed_layers({**config, "rope_parameters": {FULL: None, SLIDING: None}}),
    )
    return tuple(
        turned[index] if config["no_rope_layers"][index] else still[index]
        for index in range(len(turned))
    )


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(config, mlp_bias=bool(config.get("mlp_bias", False)))


FAMILY = decoder(
    "smollm3",
    defaults=DEFAULTS,
    spell=spell,
    layers=layers,
    options=options,
    parameters=dense(bias=biased, out_bias=biased, mlp_bias="mlp_bias"),
)
