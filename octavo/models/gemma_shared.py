"""Gemma 3n and Gemma 4: the last layers read the keys and values of earlier ones. Planned for. Torch-free data.

Owns class defaults, which layer reads whose cache, and that full layers of Gemma 4 have heads of their own size and number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError
from octavo.models.common import FULL, SLIDING, every, listed, planned, typed_layers
from octavo.models.weights import attention, embeddings, experts, gated_mlp
from octavo.spec.attention import AttentionParams
from octavo.spec.kind import Config, LayerSpec, count

GEMMA3N: Final = {
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_correct_scale": True,
    "laurel_rank": 64,
}
GEMMA4: Final = {
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
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
}


def gemma3n_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fifth layer is full."""
    return {"layer_types": config.get("layer_types") or every(config, 5, FULL, SLIDING)}


def gemma4_spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every sixth layer is full, and the last one whatever the file says."""
    types = listed(config, "layer_types") or every(config, 6, FULL, SLIDING)
    last = count(config, "num_hidden_layers") - 1
    return {"layer_types": [FULL if index == last else name for index, name in enumerate(types)]}


def share(config: Config, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The last ``num_kv_shared_layers`` read the cache of the last layer of their type before them.

    Raises ConfigError where there is no such layer.
    """
    first = len(layers) - count(config, "num_kv_shared_layers", 0)
    if first < 0:
        raise ConfigError(
            f"num_kv_shared_layers {config['num_kv_shared_layers']} is more than the {len(layers)} layers there are"
        )
    types, made = config["layer_types"], list(layers)
    for index in range(first, len(layers)):
        producers = [layer for layer in range(first) if types[layer] == types[index]]
        if not producers:
            raise ConfigError(
                f"num_kv_shared_layers: layer {index} shares, but no {types[index]} layer before it keeps a cache"
            )
        made[index] = replace(layers[index], shares=producers[-1])
    return tuple(made)


def gemma3n_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Full and sliding layers, the last of which share."""
    return share(config, typed_layers(config))


def gemma4_layers(config: Config) -> tuple[LayerSpec, ...]:
    """As Gemma 3n; full layers by ``global_head_dim`` and, with ``attention_k_eq_v``, ``num_global_key_value_heads``."""
    near, heads = typed_layers(config), config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    changes = {"head_dim": config["global_head_dim"], **({} if heads is None else {"num_key_value_heads": heads})}
    far, types = typed_layers({**config, **changes}), config["layer_types"]
    return share(config, [far[index] if types[index] == FULL else near[index] for index in range(len(near))])


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


def gemma3n_parameters(config: Config) -> int:
    """Beside attention and MLP: alternating updates (AltUp), low-rank residuals (LAuReL), inputs per layer."""
    layers, hidden, streams = gemma3n_layers(config), count(config, "hidden_size"), count(config, "altup_num_inputs")
    inner = config["intermediate_size"]
    given = list(inner) if isinstance(inner, list | tuple) else [inner] * len(layers)
    sizes = [count({"intermediate_size": size}, "intermediate_size") for size in given]
    if len(sizes) != len(layers):
        raise ConfigError(f"intermediate_size names {len(sizes)} layers, num_hidden_layers says {len(layers)}")
    altup = (1 if config["altup_correct_scale"] else 0) * hidden + streams**2 + streams**3 + streams * hidden + hidden
    laurel = 2 * hidden * count(config, "laurel_rank") + hidden
    made = embeddings(config) + per_layer_inputs(config, len(layers)) + 2 * (streams - 1) * hidden**2
    for layer, size in zip(layers, sizes, strict=True):
        made += shared_attention(layer) + gated_mlp(hidden, size) + 4 * hidden + altup + laurel
    return made


def gemma4_parameters(config: Config) -> int:
    """Beside attention and MLP: experts next to the MLP, and inputs per layer."""
    layers, hidden = gemma4_layers(config), count(config, "hidden_size")
    made = embeddings(config) + per_layer_inputs(config, len(layers))
    for layer, name in zip(layers, config["layer_types"], strict=False):
        wide = 2 if config.get("use_double_wide_mlp") and layer.shares is not None else 1
        made += shared_attention(layer, values=not (config.get("attention_k_eq_v") and name == FULL))
        made += gated_mlp(hidden, wide * count(config, "intermediate_size")) + 4 * hidden
        if config.get("enable_moe_block"):
            number = count(config, "num_experts")
            made += experts(hidden, count(config, "moe_intermediate_size"), number) + number + 4 * hidden
    return made


FAMILIES = (
    planned(
        "gemma3n_text",
        aliases=("gemma3n",),
        defaults=GEMMA3N,
        spell=gemma3n_spell,
        layers=gemma3n_layers,
        parameters=gemma3n_parameters,
    ),
    planned(
        "gemma4_text",
        aliases=("gemma4",),
        defaults=GEMMA4,
        spell=gemma4_spell,
        layers=gemma4_layers,
        parameters=gemma4_parameters,
    ),
)
