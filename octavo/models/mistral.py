"""Mistral and Ministral: a window on all layers, or on those that ``layer_types`` names. Torch-free
data.

Owns class defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.models.common import decoder
from octavo.models.weights import dense
from octavo.models.windowed import window_everywhere

DEFAULTS: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}
"""What Transformers' MistralConfig and MinistralConfig take where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """No biases, whatever the file says; a Mistral with ``layer_types`` is a Ministral, as
    Transformers reads it.
    """
    return {**window_everywhere(config), "attention_bias": False, "qk_norm": None}


FAMILIES = tuple(
    decoder(name, defaults=DEFAULTS, spell=spell, parameters=dense())
    for name in ("mistral", "ministral")
)
