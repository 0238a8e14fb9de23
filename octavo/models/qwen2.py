"""The Qwen2 family: Qwen2 and 2.5. Torch-free data.

Owns class defaults, and that q, k and v have biases and the output has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.models.common import decoder
from octavo.models.weights import always, dense
from octavo.models.windowed import window_if_used

DEFAULTS: Final = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""What Transformers' Qwen2Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Biases, and a window only where it is used."""
    return {**window_if_used(config), "attention_bias": True, "out_bias": False, "qk_norm": None}


FAMILY = decoder("qwen2", defaults=DEFAULTS, spell=spell, parameters=dense(bias=always))
