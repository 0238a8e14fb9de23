"""What several families' files say alike: layer lists from ``layer_types``, refusals, options,
tensor names. Torch-free.

Owns no family. Knows the layer types that Transformers gives names to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import ConfigError, UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.sliding.spec import SlidingWindow
from octavo.spec.decoder import DecoderOptions
from octavo.spec.family import Family, Rename, Repack
from octavo.spec.kind import PLANNING, Config, Kind, LayerSpec, count

FULL, SLIDING, CHUNKED, LINEAR = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)

OLD_TYPES: Final = {"attention": FULL, "mamba": LINEAR}
"""Layer types by the names that older configs have for them."""

DECODER = "octavo.nn.decoder:Decoder"

Mixers = tuple[tuple[str, type[Kind]], ...]
"""(module name in the checkpoint, kind) of everything that mixes tokens in a layer; empty where
nothing does.
"""

IGNORED = (r".*\.rotary_emb\.inv_freq",)
"""Tensors that old checkpoints carry and that follow from the config."""

GATE_UP: Final = Repack(
    pattern=r"(.*)\.gate_up_proj\.weight", into=(r"\1.gate_proj.weight", r"\1.up_proj.weight")
)
"""Gate and up projection of an MLP in one tensor."""

GGUF_NAMES: tuple[Rename, ...] = (
    (r"token_embd\.weight", r"model.embed_tokens.weight"),
    (r"output_norm\.weight", r"model.norm.weight"),
    (r"output\.weight", r"lm_head.weight"),
    (r"blk\.(\d+)\.attn_(q|k|v)\.(weight|bias)", r"model.layers.\1.self_attn.\2_proj.\3"),
    (r"blk\.(\d+)\.attn_output\.(weight|bias)", r"model.layers.\1.self_attn.o_proj.\2"),
    (r"blk\.(\d+)\.attn_(q|k)_norm\.weight", r"model.layers.\1.self_attn.\2_norm.weight"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)\.(weight|bias)", r"model.layers.\1.mlp.\2_proj.\3"),
    (r"blk\.(\d+)\.attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
)
"""GGUF names that mean the same in every family of this shape."""


def refuse(config: Config, fields: Mapping[str, Iterable[Any]]) -> None:
    """Raise UnsupportedError for the first field whose value is neither absent nor among those that
    are no change at all.

    Not for planning: fields that change computation change no cache.
    """
    if config.get(PLANNING):
        return
    for name, harmless in fields.items():
        value = config.get(name)
        if value is not None and value not in tuple(harmless):
            raise UnsupportedError(f"{name} {value!r} is not supported")


def typed_layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer, full or sliding by ``config["layer_types"]``."""
    return layers_by_type(
        config, {FULL: (("self_attn", FullAttention),), SLIDING: (("self_attn", SlidingWindow),)}
    )


def layers_by_type(
    config: Config, mixers: Mapping[str, Mixers], *, field: str = "layer_types"
) -> tuple[LayerSpec, ...]:
    """The layers that ``config[field]`` names; entries past the layer count, of layers for
    drafting, are not layers.

    mixers: layer type -> what mixes tokens in such a layer. Raises ConfigError where a layer has no
    type, UnsupportedError where its type is none of these.
    """
    layers = count(config, "num_hidden_layers")
    types = listed(config, field)
    if len(types) < layers:
        raise ConfigError(f"{field} names {len(types)} layers, num_hidden_layers says {layers}")
    made = []
    for index, name in enumerate(types[:layers]):
        found = mixers.get(OLD_TYPES.get(name, name) if isinstance(name, str) else "")
        if found is None:
            raise UnsupportedError(
                f"{field}[{index}] {name!r} is not supported; supported: {', '.join(mixers)}"
            )
        made.append(
            LayerSpec(
                index=index,
                mixers=tuple((mixer, kind.from_hf(config, index)) for mixer, kind in found),
            )
        )
    return tuple(made)


def listed(config: Mapping[str, Any], name: str) -> list[Any]:
    """``config[name]``, empty where it is absent. Raises ConfigError unless it is a list."""
    value = config.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list, not {value!r}")
    return list(value or ())


def every(config: Config, period: int, rare: str, other: str) -> list[str]:
    """Layer types in which every ``period``-th layer is ``rare``. Raises ConfigError unless the
    period is positive.
    """
    if not isinstance(period, int) or period < 1:
        raise ConfigError(
            f"the period of {rare} layers must be a whole number of at least 1, not {period!r}"
        )
    return [
        other if (index + 1) % period else rare
        for index in range(count(config, "num_hidden_layers"))
    ]


def planned(
    name: str,
    *,
    defaults: Mapping[str, Any],
    parameters: Callable[[Config], int] | None,
    spell: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
    layers: Callable[[Config], tuple[LayerSpec, ...]] = typed_layers,
    aliases: tuple[str, ...] = (),
) -> Family:
    """A family that can be planned for but not run yet.

    spell: entries to add to the config with its defaults filled in: what the file leaves to be
        derived.
    """

    def normalize(config: Config) -> Config:
        full = {**defaults, **config}
        return {**full, **spell(full)}

    return Family(
        name=name,
        model_types=(name, *aliases),
        normalize=normalize,
        layers=layers,
        defaults=defaults,
        parameters=parameters,
    )


def decoder_options(config: Config, **changes: Any) -> Mapping[str, Any]:
    """Options of ``DECODER`` by the names that most configs have for them; ``changes`` are
    ``DecoderOptions``' own fields.
    """
    usual = {
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "activation": config.get("hidden_act"),
        "norm_eps": float(config["rms_norm_eps"]),
        "tied_embeddings": bool(config["tie_word_embeddings"]),
    }
    return dict(vars(DecoderOptions(**{**usual, **changes})))


def decoder(
    name: str,
    *,
    defaults: Mapping[str, Any],
    parameters: Callable[[Config], int],
    spell: Callable[[dict[str, Any]], Mapping[str, Any]],
    layers: Callable[[Config], tuple[LayerSpec, ...]] = typed_layers,
    options: Callable[[Config], Mapping[str, Any]] = decoder_options,
    aliases: tuple[str, ...] = (),
) -> Family:
    """A family that ``DECODER`` runs; arguments as for ``planned``, and the decoder's options."""
    family = planned(
        name, defaults=defaults, parameters=parameters, spell=spell, layers=layers, aliases=aliases
    )
    return replace(family, module=DECODER, options=options, ignored=IGNORED)


def rope_by_type(config: Config, *, far: float, near: float | None = None) -> dict[str, Any]:
    """``rope_parameters`` of full and of sliding layers, where ``rope_scaling`` is that of full
    layers only.

    far, near: thetas where the file gives none; without ``near`` both have the same, else that of
    sliding layers is ``rope_local_base_freq``. Raises UnsupportedError where ``rope_parameters``
    are not one mapping per layer type.
    """
    given = config.get("rope_parameters") or {}
    if config.get(PLANNING):
        return {}
    strange = sorted(set(given) - {FULL, SLIDING})
    if strange:
        raise UnsupportedError(
            f"rope_parameters.{strange[0]} is not supported: this model has one entry per layer"
            " type"
        )
    theta = config.get("rope_theta", far)
    local = theta if near is None else config.get("rope_local_base_freq", near)
    return {
        FULL: {
            "rope_theta": theta,
            **(config.get("rope_scaling") or {}),
            **(given.get(FULL) or {}),
        },
        SLIDING: {"rope_theta": local, **(given.get(SLIDING) or {})},
    }


def rotated_only(config: Config, *layer_types: str) -> dict[str, Any]:
    """``rope_parameters`` by which layers of these types are rotated, and full ones are not unless
    they are among them.
    """
    old = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return {FULL: None, **dict.fromkeys(layer_types, config.get("rope_parameters") or old)}


def gguf_config(
    metadata: Mapping[str, Any], keys: Mapping[str, str], known: Iterable[str]
) -> dict[str, Any]:
    """Config entries by ``keys`` (GGUF key -> config key). A key in neither ``keys`` nor ``known``
    is refused by name.
    """
    for key in metadata:
        if key not in keys and key not in tuple(known):
            raise UnsupportedError(f"GGUF key {key} is not supported")
    return {keys[key]: value for key, value in metadata.items() if key in keys}


GGUF_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""GGUF metadata keys (without the architecture) that mean the same in every family of this shape.
"""
