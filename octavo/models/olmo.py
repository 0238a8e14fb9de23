"""OLMo 2 and 3: norms behind attention and MLP, and over the whole projections of q and k.
Torch-free data.

Owns class defaults, and that of OLMo 3 only full layers have scaled rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from octavo.models.common import decoder, decoder_options, rope_by_type
from octavo.models.weights import biased, dense, whole_norms
from octavo.models.windowed import full_every, full_everywhere

OLMO2: Final = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OLMO3: Final = {**OLMO2, "sliding_window": 4096}

NORMS: Final = {"qk_norm": "scale", "qk_norm_over": "projection"}


def olmo2_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is full."""
    return {**full_everywhere(config), **NORMS}


def olmo3_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer is full. Both types have one theta, also where Transformers, reading old
    configs, has its default.
    """
    return {**full_every(4)(config), **NORMS, "rope_parameters": rope_by_type(config, far=500000.0)}


_post = partial(
    decoder,
    options=partial(decoder_options, placement="post"),
    parameters=dense(bias=biased, out_bias=biased, norms=whole_norms),
)
FAMILIES = (
    _post("olmo2", defaults=OLMO2, spell=olmo2_spell),
    _post("olmo3", defaults=OLMO3, spell=olmo3_spell),
)
