"""Which layers have a window, as configs say it. Torch-free.

Owns no family. Every function takes a config with its class defaults filled in and returns entries
to add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.models.common import FULL, SLIDING, every
from octavo.spec.kind import count


def window_everywhere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer has the window, unless there is none or ``layer_types`` says otherwise."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return {"layer_types": config.get("layer_types") or [kind] * count(config, "num_hidden_layers")}


def full_everywhere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer sees everything."""
    return {"layer_types": [FULL] * count(config, "num_hidden_layers")}


def window_if_used(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A window counts only with ``use_sliding_window``, then from layer ``max_window_layers``
    on.
    """
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    layers = count(config, "num_hidden_layers")
    first = layers if window is None else count(config, "max_window_layers", 0)
    types = config.get("layer_types") or [
        SLIDING if index >= first else FULL for index in range(layers)
    ]
    return {"sliding_window": window, "layer_types": types}


def full_every(default: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """One layer in ``sliding_window_pattern``, a number or a string such as ``LLLG``, is full;
    without a window all are.
    """

    def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
        if config.get("layer_types"):
            return {}
        if config.get("sliding_window") is None:
            return full_everywhere(config)
        pattern = config.get("sliding_window_pattern") or default
        if isinstance(pattern, str):
            layers = count(config, "num_hidden_layers")
            types = [
                FULL if pattern[index % len(pattern)] == "G" else SLIDING for index in range(layers)
            ]
            # The last layer sees everything, wherever the pattern ends.
            return {"layer_types": [*types[:-1], FULL]}
        return {"layer_types": every(config, pattern, FULL, SLIDING)}

    return spell
