"""What is read of a config against Transformers: class defaults, numbers of weights, and what a
cache holds of a prompt.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.spec.hf import find_families, load_config, read_spec, text_config
from octavo.spec.kind import LayerSpec
from octavo.spec.law import Chunk
from octavo.spec.stream import CacheDtypes

DATA = Path(__file__).resolve().parent.parent / "data"
TINY: dict[str, dict[str, Any]] = json.loads(
    (DATA / "tiny_configs.json").read_text(encoding="utf-8")
)
REAL = sorted(path.stem for path in (DATA / "configs").glob("*.json") if path.stem != "ANSWER_KEY")
FAMILIES = find_families()
TOKENS = 41

UPSTREAM = {"kimi_k2": "deepseek_v3"}
"""Model types that Transformers reads with another class than the one of that name."""


def theirs(config: dict[str, Any], **options: Any) -> Any:
    given = {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "dtype", "torch_dtype")
    }
    model_type = given.pop("model_type")
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(UPSTREAM.get(model_type, model_type), **given), **options
    )


# -- defaults --------------------------------------------------------------------------------------

DERIVED = {
    "sliding_window": "None in classes whose window is not used",
    "time_step_rank": "auto, until the class is made",
    "mamba_dt_rank": "auto, until the class is made",
    "mamba_d_head": "auto, until the class is made",
    "lru_width": "the hidden size, once the class is made",
    "intermediate_size": "a list, once the class is made",
}
TYPES = sorted(
    {name for family in FAMILIES.families for name in family.model_types} - set(UPSTREAM)
)


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    try:
        upstream = AutoConfig.for_model(model_type).get_text_config()
    except ValueError:
        pytest.skip(f"Transformers has no {model_type}")
    upstream.allow_global_per_layer_attribute_access = True
    defaults = FAMILIES.for_model_type(model_type).defaults
    known = {name: value for name, value in defaults.items() if hasattr(upstream, name)}
    assert len(known) > len(defaults) / 2
    for name, value in known.items():
        upstream_value = getattr(upstream, name)
        if name in DERIVED and (
            upstream_value is None or value in (None, "auto") or isinstance(upstream_value, list)
        ):
            continue
        assert (
            type(value)(upstream_value) if isinstance(value, list | tuple) else upstream_value
        ) == value, name


# -- weights ---------------------------------------------------------------------------------------


def check_parameters(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        expected = sum(weight.numel() for weight in theirs(config).parameters())
    assert read_spec(config, families=FAMILIES, planning=True).parameters == expected


@pytest.mark.parametrize("name", TINY)
def test_weights_of_tiny_models_are_counted_exactly(name: str) -> None:
    check_parameters(TINY[name])


@pytest.mark.parametrize("name", REAL)
def test_weights_of_real_models_are_counted_exactly(name: str) -> None:
    check_parameters(dict(text_config(load_config(DATA / "configs" / f"{name}.json"))))


VARIANTS: dict[str, dict[str, Any]] = {
    "llama biased": {
        **TINY["llama"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "glm4_moe norms": {
        "model_type": "glm4_moe",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "zamba2 without adapters": {
        **TINY["zamba2"],
        "use_shared_attention_adapter": False,
        "num_mem_blocks": 1,
    },
    "falcon_h1 without norm": {
        **TINY["falcon_h1"],
        "mamba_rms_norm": False,
        "mamba_proj_bias": True,
        "mlp_bias": True,
    },
    "qwen3_next mixed": {**TINY["qwen3_next"], "mlp_only_layers": [1], "decoder_sparse_step": 2},
    "mamba2 biased": {**TINY["mamba2"], "use_bias": True, "use_conv_bias": False},
    "lfm2 biased": {**TINY["lfm2"], "conv_bias": True, "block_auto_adjust_ff_dim": False},
    "nemotron_h latent": {
        **TINY["nemotron_h"],
        "moe_latent_size": 24,
        "mlp_bias": False,
        "attention_bias": True,
    },
    "granite without experts": {**TINY["granitemoehybrid"], "num_local_experts": 0},
    "deepseek_v3 without query latent": {
        **TINY["deepseek_v3"],
        "q_lora_rank": None,
        "first_k_dense_replace": 4,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_follow_the_options_that_change_them(name: str) -> None:
    check_parameters(VARIANTS[name])


# -- caches ----------------------------------------------------------------------------------------

CACHED = (
    "llama",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "cohere2",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "mamba",
    "mamba2",
    "jamba",
    "bamba",
    "nemotron_h",
    "falcon_h1",
    "granitemoehybrid",
    "zamba2",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "olmo_hybrid",
)


def ours(layer: LayerSpec) -> dict[str, int]:
    """Elements of one layer after ``TOKENS``, by what Transformers calls them."""
    made: dict[str, int] = {}
    if layer.shares is not None:
        return made
    for stream in (s for _, kind in layer.mixers for s in kind.streams(CacheDtypes(kv="float32"))):
        entries = sum((stop - start) // stream.stride for start, stop in stream.needs(TOKENS))
        for field in stream.fields:
            name = (
                "conv"
                if field.name.startswith("conv")
                else "recurrent"
                if field.name == "recurrent"
                else "tokens"
            )
            made[name] = made.get(name, 0) + entries * prod(field.shape)
    return made


def held(layer: Any) -> dict[str, int]:
    """The same of a layer of a Transformers cache, without the column of a convolution that is not
    needed.
    """
    made: dict[str, int] = {}
    for name, value in vars(layer).items():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
                continue
            size, word = tensor.numel(), name.split("_")[0]
            if word == "conv":
                size = size // tensor.shape[-1] * (tensor.shape[-1] - 1)
            key = word if word in ("conv", "recurrent") else "tokens"
            made[key] = made.get(key, 0) + size
    return made


@pytest.mark.parametrize("name", CACHED)
def test_caches_hold_what_transformers_holds(name: str) -> None:
    torch.manual_seed(0)
    model = theirs(TINY[name], attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    # Which name it has depends on the model's kind; older ones call it after the state space.
    cache = next(
        out[key] for key in ("past_key_values", "cache_params", "cache") if out.get(key) is not None
    )
    spec = read_spec(TINY[name], families=FAMILIES, planning=True)
    assert len(cache.layers) == len(spec.layers)
    chunked = [layer.index for layer in spec.layers for _, kind in layer.mixers if has_chunks(kind)]
    for index, (mine, upstream) in enumerate(zip(spec.layers, cache.layers, strict=True)):
        if index in chunked:
            # Transformers keeps a window as long as a chunk; what a chunk has past its border is
            # all that can be seen.
            heads = 2 * 2 * 16
            assert ours(mine) == {"tokens": TOKENS % 16 * heads}
            assert held(upstream) == {"tokens": 15 * heads}
        else:
            assert ours(mine) == held(upstream), index


def has_chunks(kind: Any) -> bool:
    return any(stream.law == Chunk(16) for stream in kind.streams(CacheDtypes()))


def test_v4_caches_hold_what_transformers_holds() -> None:
    """Windows, entries, index keys and open groups; of the group before, Transformers keeps the
    half that is still used.
    """
    config = TINY["deepseek_v4"]
    model = theirs(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True)["past_key_values"]
    spec = read_spec(config, families=FAMILIES, planning=True)
    for mine, upstream in zip(spec.layers, cache.layers, strict=True):
        (_, kind), *rest = mine.mixers
        assert not rest
        streams = {stream.name: stream for stream in kind.streams(CacheDtypes(kv="float32"))}
        entries = {
            name: sum((stop - start) // stream.stride for start, stop in stream.needs(TOKENS))
            for name, stream in streams.items()
        }
        assert entries["window"] * 32 == upstream.keys.numel(), "one entry is key and value"
        compressed = getattr(upstream, "compressed_kv", {})
        assert ("compressed" in streams, "index" in streams) == (
            "compressor" in compressed,
            "indexer" in compressed,
        )
        for name, key, state in (
            ("compressed", "compressor", "compressor"),
            ("index", "indexer", "index_compressor"),
        ):
            if name not in streams:
                continue
            stream, law = streams[name], streams[state].law
            assert entries[name] * stream.entry_bytes == compressed[key].numel() * 4
            pending = upstream.buffer_kv[key]
            overlap = getattr(upstream, "overlap_kv", {}).get(key)
            assert entries[state] == pending.shape[1] + (0 if overlap is None else overlap.shape[1])
            assert streams[state].fields[0].shape == (pending.shape[-1],)
            assert law.span == stream.stride * (1 if overlap is None else 2)
