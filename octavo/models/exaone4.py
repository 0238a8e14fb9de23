"""EXAONE 4: norms behind attention and MLP and over heads; full layers beside windows are not
rotated. Torch-free data.

Owns class defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from octavo.models.common import SLIDING, decoder, decoder_options, rotated_only
from octavo.models.weights import dense, head_norms
from octavo.models.windowed import full_every

DEFAULTS: Final = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}
"""What Transformers' Exaone4Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """No biases. Full layers are rotated only where the config has no window at all."""
    rope = (
        {}
        if config.get("sliding_window") is None
        else {"rope_parameters": rotated_only(config, SLIDING)}
    )
    return {**full_every(4)(config), **rope, "attention_bias": False, "qk_norm": "scale"}


FAMILY = decoder(
    "exaone4",
    defaults=DEFAULTS,
    spell=spell,
    options=partial(decoder_options, placement="post"),
    parameters=dense(norms=head_norms),
)
