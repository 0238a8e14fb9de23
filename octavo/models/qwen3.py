"""The dense Qwen3 family: grouped heads with RMSNorm over each query and key head. Torch-free data.

Owns class defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.models.common import decoder
from octavo.models.weights import biased, dense, head_norms
from octavo.models.windowed import window_if_used

DEFAULTS: Final = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""What Transformers' Qwen3Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A norm over each head, and a window only where it is used."""
    return {**window_if_used(config), "qk_norm": "scale"}


FAMILY = decoder(
    "qwen3",
    defaults=DEFAULTS,
    spell=spell,
    parameters=dense(bias=biased, out_bias=biased, norms=head_norms),
)
