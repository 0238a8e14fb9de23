"""Phi-3 without LongRoPE: a window on all layers, if any; q, k and v in one tensor. Torch-free
data.

Owns class defaults and refusals of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import UnsupportedError
from octavo.models.common import GATE_UP, decoder
from octavo.models.weights import dense
from octavo.models.windowed import window_everywhere
from octavo.spec.family import Repack
from octavo.spec.kind import PLANNING

DEFAULTS: Final = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""What Transformers' Phi3Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """No biases. Raises UnsupportedError for scaled rotation: Phi-3 calls LongRoPE by several names
    and has no other.

    LongRoPE turns all tokens of a request differently once it is longer than
    ``original_max_position_embeddings``, so that keys cached before are wrong from then on.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(field) or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type != "default" and not config.get(PLANNING):
        raise UnsupportedError(
            f"{field}.rope_type {rope_type!r} is not supported for phi3: cached keys do not"
            " outlive it"
        )
    return {
        **window_everywhere(config),
        "qk_norm": None,
        "attention_bias": False,
        "partial_rotary": True,
    }


FAMILY = replace(
    decoder("phi3", defaults=DEFAULTS, spell=spell, parameters=dense()),
    repack=(
        GATE_UP,
        Repack(
            pattern=r"(.*)\.qkv_proj\.weight",
            into=(r"\1.q_proj.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"),
        ),
    ),
)
