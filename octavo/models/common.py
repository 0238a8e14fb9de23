"""What several families' files say alike: layer lists from ``layer_types``, refusals, tensor names. Torch-free.

Owns no family. Knows the two layer types that Transformers calls ``full_attention`` and ``sliding_attention``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from octavo.base import UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.sliding.spec import SlidingWindow
from octavo.spec.family import Rename
from octavo.spec.kind import Config, Kind, LayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"

DECODER = "octavo.nn.decoder:Decoder"

IGNORED = (r".*\.rotary_emb\.inv_freq",)
"""Tensors that old checkpoints carry and that follow from the config."""

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
    """Raise UnsupportedError for the first field whose value is neither absent nor among those that are no change at all."""
    for name, harmless in fields.items():
        value = config.get(name)
        if value is not None and value not in tuple(harmless):
            raise UnsupportedError(f"{name} {value!r} is not supported")


def typed_layers(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer, by ``config["layer_types"]``; entries past the layer count are not layers."""
    count, types = int(config["num_hidden_layers"]), config["layer_types"]
    if len(types) < count:
        raise UnsupportedError(f"layer_types names {len(types)} layers, num_hidden_layers says {count}")
    return tuple(LayerSpec(index=index, mixers=(("self_attn", _kind(config, types, index)),)) for index in range(count))


def _kind(config: Config, types: Sequence[str], index: int) -> Kind:
    if types[index] == FULL:
        return FullAttention.from_hf(config, index)
    if types[index] == SLIDING:
        return SlidingWindow.from_hf(config, index)
    raise UnsupportedError(f"layer_types[{index}] {types[index]!r} is not supported; supported: {FULL}, {SLIDING}")


def gguf_config(metadata: Mapping[str, Any], keys: Mapping[str, str], known: Iterable[str]) -> dict[str, Any]:
    """Config entries by ``keys`` (GGUF key -> config key). A key in neither ``keys`` nor ``known`` is refused by name."""
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
"""GGUF metadata keys (without the architecture) that mean the same in every family of this shape."""
