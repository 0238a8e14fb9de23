"""The Llama family: Llama 1 to 3.x, SmolLM2 and whatever else says ``model_type: llama``.
Torch-free data.

Owns class defaults, refusals and GGUF conventions of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import UnsupportedError
from octavo.models.common import (
    DECODER,
    FULL,
    GGUF_KEYS,
    GGUF_NAMES,
    IGNORED,
    decoder_options,
    gguf_config,
    refuse,
    typed_layers,
)
from octavo.models.weights import biased, dense
from octavo.spec.family import Family, GGUFRules
from octavo.spec.kind import Config, count

DEFAULTS: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What Transformers' LlamaConfig takes where the file is silent."""


def normalize(config: Config) -> Config:
    """Defaults filled in, every layer full attention."""
    refuse(config, {"rope_interleaved": (False,), "pretraining_tp": (1,)})
    if set(config.get("layer_types") or [FULL]) != {FULL}:
        raise UnsupportedError(f"layer_types of a llama model must all be {FULL}")
    full = {**DEFAULTS, **config, "qk_norm": None}
    return {**full, "layer_types": [FULL] * count(full, "num_hidden_layers")}


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(config, mlp_bias=bool(config.get("mlp_bias", False)))


def from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Config from GGUF metadata of architecture ``llama``."""
    config = gguf_config(metadata, GGUF_KEYS, ("rope.dimension_count", "attention.value_length"))
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    refuse(metadata, {"rope.dimension_count": (head_dim,), "attention.value_length": (head_dim,)})
    return {**config, "model_type": "llama", "head_dim": head_dim}


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    normalize=normalize,
    layers=typed_layers,
    defaults=DEFAULTS,
    parameters=dense(bias=biased, out_bias=biased, mlp_bias="mlp_bias"),
    options=options,
    module=DECODER,
    names=(),
    ignored=IGNORED,
    gguf=GGUFRules(
        architecture="llama",
        config=from_gguf,
        names=(
            *GGUF_NAMES,
            (r"blk\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
        ),
        # The converter interleaves the two halves of every head of q and k, as llama.cpp rotates
        # neighbouring pairs.
        unpermute=(
            (r".*\.q_proj\.(weight|bias)", "num_attention_heads"),
            (r".*\.k_proj\.(weight|bias)", "num_key_value_heads"),
        ),
    ),
)
