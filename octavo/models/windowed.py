"""Which layers have a window, as configs say it; and Phi-3, Cohere 2 and GLM-4, planned for. Torch-free data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.models.common import FULL, SLIDING, every, planned
from octavo.models.weights import biased, dense
from octavo.spec.kind import count


def window_everywhere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer has the window, unless there is none or ``layer_types`` says otherwise."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return {"layer_types": config.get("layer_types") or [kind] * count(config, "num_hidden_layers")}


def full_everywhere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer sees everything."""
    return {"layer_types": [FULL] * count(config, "num_hidden_layers")}


def window_if_used(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A window counts only with ``use_sliding_window``, then from layer ``max_window_layers`` on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    layers = count(config, "num_hidden_layers")
    first = layers if window is None else count(config, "max_window_layers", 0)
    types = config.get("layer_types") or [SLIDING if index >= first else FULL for index in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def full_every(default: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """One layer in ``sliding_window_pattern``, a number or a string such as ``LLLG``, is full; without a window all are."""

    def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
        if config.get("layer_types"):
            return {}
        if config.get("sliding_window") is None:
            return full_everywhere(config)
        pattern = config.get("sliding_window_pattern") or default
        if isinstance(pattern, str):
            layers = count(config, "num_hidden_layers")
            types = [FULL if pattern[index % len(pattern)] == "G" else SLIDING for index in range(layers)]
            # The last layer sees everything, wherever the pattern ends.
            return {"layer_types": [*types[:-1], FULL]}
        return {"layer_types": every(config, pattern, FULL, SLIDING)}

    return spell


PHI3: Final = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
COHERE2: Final = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
GLM4: Final = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}

FAMILIES = (
    planned("phi3", defaults=PHI3, spell=window_everywhere, parameters=dense()),
    planned("cohere2", defaults=COHERE2, spell=full_every(4), parameters=dense(layer_norms=1, bias=biased, out_bias=biased)),
    planned("glm4", defaults=GLM4, spell=full_everywhere, parameters=dense(layer_norms=4, bias=biased)),
)
