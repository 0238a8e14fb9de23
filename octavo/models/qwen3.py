"""The dense Qwen3 family: grouped heads with RMSNorm over each query and key head. Torch-free data.

Owns class defaults and refusals of the family.
"""

from __future__ import annotations

from typing import Final

from octavo.models.common import DECODER, FULL, IGNORED, SLIDING, decoder_options, typed_layers
from octavo.models.weights import biased, dense, head_norms
from octavo.spec.family import Family
from octavo.spec.kind import Config, count

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


def normalize(config: Config) -> Config:
    """Defaults filled in; a window counts only with ``use_sliding_window``, then from layer ``max_window_layers`` on."""
    full = {**DEFAULTS, **config, "qk_norm": "scale"}
    if not full["use_sliding_window"]:
        full["sliding_window"] = None
    if not full.get("layer_types"):
        first = full["max_window_layers"] if full["sliding_window"] is not None else full["num_hidden_layers"]
        full["layer_types"] = [SLIDING if index >= first else FULL for index in range(count(full, "num_hidden_layers"))]
    return full


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    normalize=normalize,
    layers=typed_layers,
    defaults=DEFAULTS,
    parameters=dense(bias=biased, out_bias=biased, norms=head_norms),
    options=decoder_options,
    module=DECODER,
    names=(),
    ignored=IGNORED,
)
