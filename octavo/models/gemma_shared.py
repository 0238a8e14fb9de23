"""What Gemma 3n and Gemma 4 have in common: the last layers read the keys and values of earlier
ones, layers have small inputs of their own, checkpoints carry encoders of images and sound.
Torch-free data.

Owns which layer reads whose cache, the names of the multimodal checkpoints, and counts of the parts
that both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError
from octavo.models.common import IGNORED
from octavo.models.weights import attention
from octavo.spec.attention import AttentionParams
from octavo.spec.family import Rename
from octavo.spec.kind import Config, LayerSpec, count

NAMES: Final[tuple[Rename, ...]] = (
    (r"(?:model\.language_model|language_model\.model)\.(.*)", r"model.\1"),
    (r"language_model\.lm_head\.weight", r"lm_head.weight"),
)
"""Tensors of multimodal checkpoints that are the text model's."""

UNREAD: Final = (*IGNORED, r"(?:model\.)?(?:vision_tower|audio_tower|embed_vision|embed_audio)\..*")
"""Tensors that are not."""


def share(config: Config, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The last ``num_kv_shared_layers`` read the cache of the last layer of their type before them.

    Raises ConfigError where there is no such layer.
    """
    first = len(layers) - count(config, "num_kv_shared_layers", 0)
    if first < 0:
        raise ConfigError(
            f"num_kv_shared_layers {config['num_kv_shared_layers']} is more than the {len(layers)}"
            " layers there are"
        )
    types, made = config["layer_types"], list(layers)
    for index in range(first, len(layers)):
        producers = [layer for layer in range(first) if types[layer] == types[index]]
        if not producers:
            raise ConfigError(
                f"num_kv_shared_layers: layer {index} shares, but no {types[index]} layer before it"
                " keeps a cache"
            )
        made[index] = replace(altered(layers[index], makes_kv=False), shares=producers[-1])
    return tuple(made)


def altered(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The layer with other ``AttentionParams``."""
    (mixer, kind), *none = layer.mixers
    assert not none, "a layer has one mixer"
    params: AttentionParams = kind.attention  # type: ignore[attr-defined]
    changed = replace(kind, attention=replace(params, **changes))  # type: ignore[call-arg]
    return replace(layer, mixers=((mixer, changed),))


def per_layer_options(config: Config, inner_sizes: Sequence[int]) -> Mapping[str, Any]:
    """Fields of ``PerLayerOptions`` by the names that both families have for them."""
    return {
        "hidden_size": count(config, "hidden_size"),
        "intermediate_size": inner_sizes[0],
        "activation": config["hidden_activation"],
        "norm_eps": float(config["rms_norm_eps"]),
        "norm": "wide",
        "placement": "sandwich",
        "embed_scale": float(config["hidden_size"]) ** 0.5,
        "tied_embeddings": bool(config["tie_word_embeddings"]),
        "logit_softcap": config["final_logit_softcapping"],
        "small_size": count(config, "hidden_size_per_layer_input", 0),
        "small_vocab": count(config, "vocab_size_per_layer_input"),
        "inner_sizes": tuple(inner_sizes),
    }


def shared_attention(layer: LayerSpec, *, values: bool = True) -> int:
    """Attention with norms over q and k; without keys and values where they are another layer's."""
    params: AttentionParams = layer.mixers[0][1].attention  # type: ignore[attr-defined]
    keys = params.hidden_size * params.num_kv_heads * params.head_dim
    made = attention(params, norms=2 * params.head_dim) - (0 if values else keys)
    return made if layer.shares is None else made - (2 if values else 1) * keys - params.head_dim


def per_layer_inputs(config: Config, layers: int) -> int:
    """A small embedding per layer, and what brings it into the hidden state."""
    hidden, small = count(config, "hidden_size"), count(config, "hidden_size_per_layer_input", 0)
    if not small:
        return 0
    table = count(config, "vocab_size_per_layer_input") * layers * small
    return table + hidden * layers * small + small + layers * (2 * hidden * small + hidden)
