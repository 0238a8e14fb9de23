"""GLM-4 (0414): norms ahead of attention and MLP and behind them, half of each head rotated.
Torch-free data.

Owns class defaults, and its checkpoints' own names of the norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from octavo.models.common import GATE_UP, decoder, decoder_options
from octavo.models.weights import biased, dense
from octavo.models.windowed import full_everywhere

DEFAULTS: Final = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
"""What Transformers' Glm4Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is full; neighbours are rotated against each other; the output has no bias."""
    rotary = {"partial_rotary": True, "interleaved_rotary": True}
    return {**full_everywhere(config), **rotary, "qk_norm": None, "out_bias": False}


FAMILY = replace(
    decoder(
        "glm4",
        defaults=DEFAULTS,
        spell=spell,
        options=partial(decoder_options, placement="sandwich"),
        parameters=dense(layer_norms=4, bias=biased),
    ),
    names=(
        (r"(.*)\.post_attention_layernorm\.weight", r"\1.pre_feedforward_layernorm.weight"),
        (r"(.*)\.post_self_attn_layernorm\.weight", r"\1.post_attention_layernorm.weight"),
        (r"(.*)\.post_mlp_layernorm\.weight", r"\1.post_feedforward_layernorm.weight"),
    ),
    repack=(GATE_UP,),
)
