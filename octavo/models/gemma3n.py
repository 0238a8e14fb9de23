"""The Gemma 3n family, text only: several hidden states, small inputs per layer, and last layers
that share. Torch-free data.

Owns class defaults, refusals and the lists of the family that have an entry per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.base import ConfigError
from octavo.models.common import FULL, SLIDING, every, listed, refuse, rope_by_type, typed_layers
from octavo.models.gemma_shared import (
    NAMES,
    UNREAD,
    altered,
    per_layer_inputs,
    per_layer_options,
    share,
    shared_attention,
)
from octavo.models.weights import embeddings, gated_mlp
from octavo.spec.family import Family
from octavo.spec.kind import Config, LayerSpec, count
from octavo.spec.per_layer import AltUpOptions
from octavo.spec.rope import LIMIT_IS_SCALED

DEFAULTS: Final = {
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_correct_scale": True,
    "laurel_rank": 64,
}
"""What Transformers' Gemma3nTextConfig takes where the file is silent."""


def normalize(config: Config) -> Config:
    """Defaults filled in, every fifth layer full, ``rope_parameters`` per layer type. Scores are
    not scaled.
    """
    refuse(config, {"use_bidirectional_attention": (False,)})
    full = {**DEFAULTS, **config, "qk_norm": "wide", "query_pre_attn_scalar": 1}
    full["layer_types"] = config.get("layer_types") or every(full, 5, FULL, SLIDING)
    full["rope_parameters"] = rope_by_type(config, far=1e6, near=1e4)
    full[LIMIT_IS_SCALED] = True
    return full


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """Full and sliding layers, the last of which share."""
    return share(config, [altered(layer, v_norm=True) for layer in typed_layers(config)])


def inner_sizes(config: Config) -> list[int]:
    """Of the MLP, layer by layer. Raises ConfigError where the file names another number of layers
    than there are.
    """
    inner, layers = config["intermediate_size"], count(config, "num_hidden_layers")
    given = list(inner) if isinstance(inner, list | tuple) else [inner] * layers
    if len(given) != layers:
        raise ConfigError(
            f"intermediate_size names {len(given)} layers, num_hidden_layers says {layers}"
        )
    return [count({"intermediate_size": size}, "intermediate_size") for size in given]


def sparsity(config: Config) -> tuple[float, ...]:
    """Of gate activations, layer by layer; where the file is silent, the first ten of more layers
    are sparse.
    """
    layers = count(config, "num_hidden_layers")
    first = 10 if layers > 10 else 0
    given = listed(config, "activation_sparsity_pattern") or [0.95] * first + [0.0] * (
        layers - first
    )
    if len(given) != layers:
        raise ConfigError(
            f"activation_sparsity_pattern names {len(given)} layers, num_hidden_layers says"
            f" {layers}"
        )
    for index, value in enumerate(given):
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(
                f"activation_sparsity_pattern[{index}] must be at least 0 and below 1, not"
                f" {value!r}"
            )
    return tuple(float(value) for value in given)


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    streams, active = (
        count(config, "altup_num_inputs"),
        count({"altup_active_idx": 0, **config}, "altup_active_idx", 0),
    )
    if active >= streams:
        raise ConfigError(f"altup_active_idx {active} is not below altup_num_inputs {streams}")
    count(config, "hidden_size_per_layer_input")
    made = AltUpOptions(
        **per_layer_options(config, inner_sizes(config)),
        rounded_factors=True,
        streams=streams,
        active=active,
        correct_scale=bool(config["altup_correct_scale"]),
        laurel_rank=count(config, "laurel_rank"),
        sparsity=sparsity(config),
    )
    return dict(vars(made))


def parameters(config: Config) -> int:
    """Beside attention and MLP: alternating updates (AltUp), low-rank residuals (LAuReL), inputs
    per layer.
    """
    layers, hidden, streams = (
        layers_of(config),
        count(config, "hidden_size"),
        count(config, "altup_num_inputs"),
    )
    altup = hidden + streams**2 + streams**3 + streams * hidden + hidden
    laurel = 2 * hidden * count(config, "laurel_rank") + hidden
    made = (
        embeddings(config) + per_layer_inputs(config, len(layers)) + 2 * (streams - 1) * hidden**2
    )
    for layer, size in zip(layers, inner_sizes(config), strict=True):
        made += shared_attention(layer) + gated_mlp(hidden, size) + 4 * hidden + altup + laurel
    return made


FAMILY = Family(
    name="gemma3n_text",
    model_types=("gemma3n_text", "gemma3n"),
    normalize=normalize,
    layers=layers_of,
    defaults=DEFAULTS,
    parameters=parameters,
    options=options,
    module="octavo.nn.altup:AltUpDecoder",
    names=NAMES,
    ignored=UNREAD,
)
