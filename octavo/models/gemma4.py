"""The Gemma 4 family, text only: full layers with heads of their own size and number, and last
layers that share. Torch-free data.

Owns class defaults, refusals and the sizes of full layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
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
from octavo.models.weights import embeddings, experts, gated_mlp
from octavo.spec.family import Family
from octavo.spec.kind import Config, LayerSpec, count
from octavo.spec.moe import MoEOptions
from octavo.spec.per_layer import PerLayerOptions
from octavo.spec.rope import LIMIT_IS_SCALED

DEFAULTS: Final = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "num_kv_shared_layers": 0,
}
"""What Transformers' Gemma4TextConfig takes where the file is silent."""

FAR: Final = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
"""Rotation of full layers where the file gives none."""


def normalize(config: Config) -> Config:
    """Defaults filled in; every sixth layer is full, and the last one whatever the file says.
    Scores are not scaled.

    Tokens of images see each other both ways (``vision``); those of text do not.
    """
    refuse(config, {"use_bidirectional_attention": (False, "vision")})
    full = {**DEFAULTS, **config, "qk_norm": "wide", "query_pre_attn_scalar": 1}
    last = count(full, "num_hidden_layers") - 1
    types = (listed(full, "layer_types") or every(full, 6, FULL, SLIDING))[: last + 1]
    full["layer_types"] = [FULL if index == last else name for index, name in enumerate(types)]
    given = {} if config.get("rope_parameters") else {"rope_parameters": {FULL: FAR}}
    full["rope_parameters"] = rope_by_type({**config, **given}, far=1e6, near=1e4)
    full[LIMIT_IS_SCALED] = True
    return full


def own_sizes(config: Config) -> Mapping[int, Mapping[str, int]]:
    """Layer -> what it has instead of the model's ``head_dim`` and ``num_key_value_heads``.

    Configs give ``per_layer_config``, or ``global_head_dim`` and ``num_global_key_value_heads`` of
    all full layers; the second counts with ``attention_k_eq_v`` only.
    """
    given, layers = config.get("per_layer_config"), count(config, "num_hidden_layers")
    if given is None:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        sizes = {
            "head_dim": config["global_head_dim"],
            **({} if heads is None else {"num_key_value_heads": heads}),
        }
        return {index: sizes for index, name in enumerate(config["layer_types"]) if name == FULL}
    if not isinstance(given, Mapping):
        raise ConfigError(f"per_layer_config must map layers to their fields, not {given!r}")
    for name, fields in given.items():
        if not str(name).isdecimal() or int(name) >= layers or not isinstance(fields, Mapping):
            raise UnsupportedError(
                f"per_layer_config[{name!r}] is not supported; keys are layers, values their fields"
            )
        strange = sorted(set(fields) - {"head_dim", "num_key_value_heads"})
        if strange:
            raise UnsupportedError(f"per_layer_config[{name!r}].{strange[0]} is not supported")
    return {int(name): fields for name, fields in given.items()}


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """Full and sliding layers, the last of which share; full ones may take values from the keys'
    projection.
    """
    plain, sizes = typed_layers(config), own_sizes(config)
    made = []
    for layer, name in zip(plain, config["layer_types"], strict=True):
        own = sizes.get(layer.index, {})
        changes = {
            "head_dim": count({"head_dim": config["head_dim"], **own}, "head_dim"),
            "num_kv_heads": count(
                {"num_key_value_heads": config["num_key_value_heads"], **own}, "num_key_value_heads"
            ),
        }
        values = bool(config.get("attention_k_eq_v")) and name == FULL
        made.append(altered(layer, **changes, v_norm=True, k_eq_v=values))
    return share(config, made)


def inner_sizes(config: Config, layers: Sequence[LayerSpec]) -> list[int]:
    """Of the MLP, layer by layer: twice as wide where ``use_double_wide_mlp`` and the layer
    shares.
    """
    inner, double = count(config, "intermediate_size"), bool(config.get("use_double_wide_mlp"))
    return [2 * inner if double and layer.shares is not None else inner for layer in layers]


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    beside = None
    if config.get("enable_moe_block"):
        beside = MoEOptions(
            layers=(),
            experts=count(config, "num_experts"),
            active=count(config, "top_k_experts"),
            inner_size=count(config, "moe_intermediate_size"),
        )
    made = per_layer_options(config, inner_sizes(config, layers_of(config)))
    return dict(vars(PerLayerOptions(**made, beside=beside)))


def parameters(config: Config) -> int:
    """Beside attention and MLP: experts next to the MLP, and inputs per layer."""
    layers, hidden = layers_of(config), count(config, "hidden_size")
    made = embeddings(config) + per_layer_inputs(config, len(layers))
    for layer, name, inner in zip(
        layers, config["layer_types"], inner_sizes(config, layers), strict=True
    ):
        made += shared_attention(
            layer, values=not (config.get("attention_k_eq_v") and name == FULL)
        )
        made += gated_mlp(hidden, inner) + 4 * hidden
        if config.get("enable_moe_block"):
            number = count(config, "num_experts")
            made += (
                experts(hidden, count(config, "moe_intermediate_size"), number)
                + number
                + 4 * hidden
            )
    return made


FAMILY = Family(
    name="gemma4_text",
    model_types=("gemma4_text", "gemma4"),
    normalize=normalize,
    layers=layers_of,
    defaults=DEFAULTS,
    parameters=parameters,
    options=options,
    module="octavo.nn.per_layer:PerLayerDecoder",
    names=NAMES,
    ignored=UNREAD,
)
