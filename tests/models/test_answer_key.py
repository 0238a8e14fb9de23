"""Public configs against what is known of the models: the kind of every layer, its sizes, and what
the caches come to in bytes.

``tests/data/configs/ANSWER_KEY.json`` was written from papers, model cards and other engines, not
from octavo. Byte counts of DeepSeek-V4 are those published for it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from octavo.base import ConfigError
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.kind import LayerSpec, ModelSpec
from octavo.spec.law import Chunk, Everything, Window
from octavo.spec.stream import CacheDtypes, Stream

CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"
KEY: dict[str, dict[str, Any]] = json.loads(
    (CONFIGS / "ANSWER_KEY.json").read_text(encoding="utf-8")
)
FAMILIES = find_families()
GIB, MILLION = 2**30, 2**20

WORDS = {
    "full": "full",
    "swa": "sliding",
    "chunked": "chunked_local",
    "mla": "mla",
    "mla+dsa": "dsa",
    "mla+dsa-shared": "dsa",
    "v4-swa": "v4_window",
    "v4-csa": "v4_csa",
    "v4-hca": "v4_hca",
    "mamba1": "mamba",
    "mamba2": "mamba2",
    "gdn": "gated_delta_net",
    "kda": "kda",
    "lightning": "lightning",
    "rglru": "rg_lru",
    "conv": "short_conv",
    "none": "",
    "full+mamba2": "full+mamba2",
    "mamba2+full": "full+mamba2",
    "shared-swa": "shared sliding",
    "shared-full": "shared full",
}
"""The key's words and the kinds' names."""


def spec_of(name: str) -> ModelSpec:
    return read_spec(load_config(CONFIGS / f"{name}.json"), families=FAMILIES, planning=True)


def described(layer: LayerSpec) -> str:
    names = "+".join(kind.name for _, kind in layer.mixers)
    return names if layer.shares is None else f"shared {names}"


def streams(layer: LayerSpec, dtypes: CacheDtypes | None = None) -> dict[str, Stream]:
    return {s.name: s for _, kind in layer.mixers for s in kind.streams(dtypes or CacheDtypes())}


def slope(spec: ModelSpec, dtypes: CacheDtypes | None = None) -> float:
    """Bytes per token of everything that is never let go."""
    groups = make_groups(spec, dtypes or CacheDtypes())
    return sum(
        m.stream.entry_bytes / m.stream.stride
        for g in groups
        if g.law.prefix is None
        for m in g.members
    )


def test_every_config_has_an_answer_and_every_answer_a_config() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*KEY, "ANSWER_KEY"}


@pytest.mark.parametrize("name", KEY)
def test_layers_are_of_the_kinds_of_the_key(name: str) -> None:
    spec = spec_of(name)
    assert [described(layer) for layer in spec.layers] == [
        WORDS[word] for word in KEY[name]["kinds"]
    ]
    assert [layer.index for layer in spec.layers] == list(range(len(spec.layers)))


@pytest.mark.parametrize("name", KEY)
def test_heads_sizes_and_windows_are_those_of_the_key(name: str) -> None:
    """Such as ``swa512 1x256 x15 + full x3``: window, K/V heads x their size, layers; later parts
    repeat the sizes before.
    """
    spec, found = spec_of(name), 0
    sizes = ""
    for kind, reach, shape, times in re.findall(
        r"\b(swa|full|chunked)(\d*)(?:\(NoPE\))? ?(\d+x\d+)? ?x(\d+)", KEY[name]["summary"]
    ):
        sizes = shape or sizes
        law = {"swa": Window, "chunked": Chunk}[kind](int(reach)) if reach else Everything()
        kv = [
            s["kv"]
            for layer in spec.layers
            if layer.shares is None and "kv" in (s := streams(layer))
        ]
        same = [stream for stream in kv if stream.law == law]
        if kind == "swa" and not reach:
            same = kv
        heads, dim = map(int, sizes.split("x"))
        assert len(same) == int(times), (kind, reach)
        assert {field.shape for stream in same for field in stream.fields} == {(heads, dim)}
        found += len(same)
    counts = KEY[name]["counts"]
    expected = sum(
        count
        for word, count in counts.items()
        if word in ("full", "swa", "chunked", "full+mamba2", "mamba2+full")
    )
    assert found == expected or (name == "falcon-h1-7b" and found == 0)


STATES = {
    "mamba-2.8b": (5120 * 3, 5120 * 16),
    "codestral-mamba-7b": ((8192 + 2 * 8 * 128) * 3, 128 * 64 * 128),
    "falcon-mamba-7b": (8192 * 3, 8192 * 16),
    "jamba-1.5-mini": (8192 * 3, 8192 * 16),
    "bamba-9b": ((8192 + 256) * 3, 128 * 64 * 128),
    "zamba2-7b": ((7168 + 2 * 2 * 64) * 3, 112 * 64 * 64),
    "falcon-h1-7b": ((3072 + 512) * 3, 24 * 128 * 256),
    "nemotron-h-8b": ((8192 + 2048) * 3, 128 * 64 * 128),
    "nemotron-3-nano-30b-a3b": ((4096 + 2 * 8 * 128) * 3, 64 * 64 * 128),
    "granite-4.0-h-tiny": ((3072 + 256) * 3, 48 * 64 * 128),
    "lfm2-1.2b": (2048 * 2, 0),
    "recurrentgemma-2b": (2560 * 3, 2560),
    "minimax-text-01-hf": (0, 64 * 128 * 128),
    "qwen3-next-80b-a3b": (8192 * 3, 32 * 128 * 128),
    "qwen3.5-9b": (8192 * 3, 32 * 128 * 128),
    "kimi-linear-48b-a3b": (3 * 4096 * 3, 32 * 128 * 128),
    "olmo-hybrid-7b": ((2880 + 2880 + 5760) * 3, 30 * 96 * 192),
}
"""Elements of one layer: past inputs of convolutions (their columns less one), recurrent state."""


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_size_of_the_equations(name: str) -> None:
    conv, recurrent = STATES[name]
    states = [s["state"] for layer in spec_of(name).layers if "state" in (s := streams(layer))]
    assert len(states) == sum(
        1 for kind in KEY[name]["kinds"] if kind not in ("full", "swa", "mla", "none")
    )
    for stream in states:
        sizes = Counter({"conv": 0})
        for field in stream.fields:
            sizes["recurrent" if field.name == "recurrent" else "conv"] += prod(field.shape)
        assert (sizes["conv"], sizes["recurrent"]) == (conv, recurrent)
        assert stream.entry_bytes == conv * 2 + recurrent * 4, (
            "activations in bfloat16, states in float32"
        )


def test_states_are_kept_in_the_dtype_asked_for() -> None:
    layer = spec_of("nemotron-3-nano-30b-a3b").layers[0]
    conv, recurrent = STATES["nemotron-3-nano-30b-a3b"]
    quantised = CacheDtypes(kv="float8_e4m3fn", state="bfloat16")
    assert streams(layer, quantised)["state"].entry_bytes == conv * 2 + recurrent * 2


def test_no_config_without_states_has_one() -> None:
    for name in set(KEY) - set(STATES):
        assert not any("state" in streams(layer) for layer in spec_of(name).layers), name


SLOPES = {
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2,
    "gemma-3-270m": 3 * 2 * 256 * 2,
    "gemma-3n-e4b": 4 * 2 * 2 * 256 * 2,
    "gemma-4-26b-a4b": 5 * 2 * 2 * 512 * 2,
    "mistral-7b-v0.1": 0,
    "mamba-2.8b": 0,
    "deepseek-v2-lite": 27 * 576 * 2,
    "deepseek-v3": 61 * 576 * 2,
    "deepseek-v3.2": 61 * (576 + 128) * 2,
    "glm-5.2": (78 * 576 + 21 * 128) * 2,
    "kimi-linear-48b-a3b": 7 * 576 * 2,
    "falcon-h1-7b": 44 * 2 * 2 * 128 * 2,
    "zamba2-7b": 13 * 2 * 32 * 224 * 2,
    "deepseek-v4-pro": 9848,
    "deepseek-v4-flash": 6880,
}


@pytest.mark.parametrize("name", SLOPES)
def test_bytes_per_token(name: str) -> None:
    assert slope(spec_of(name)) == SLOPES[name]


def test_v4_at_a_million_tokens() -> None:
    """As published: 9.62 GiB per sequence, 8.7 times less than a stack of V3.2 layers as high."""
    pro, older = (
        slope(spec_of("deepseek-v4-pro")) * MILLION,
        slope(spec_of("deepseek-v3.2")) * MILLION,
    )
    assert round(pro / GIB, 3) == 9.617
    assert round(older / GIB, 3) == 83.875
    assert round(older / pro, 2) == 8.72


FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn_x2"


@pytest.mark.parametrize(
    ("name", "indexer", "gib"),
    [
        ("deepseek-v4-pro", FP8, 5.382),
        ("deepseek-v4-pro", FP4, 4.914),
        ("deepseek-v4-flash", FP8, 3.760),
        ("deepseek-v4-flash", FP4, 3.432),
    ],
)
def test_v4_quantised_at_a_million_tokens(name: str, indexer: str, gib: float) -> None:
    dtypes = CacheDtypes(kv=FP8, indexer=indexer)
    assert round(slope(spec_of(name), dtypes) * MILLION / GIB, 3) == gib


def test_quantised_entries_have_the_published_sizes() -> None:
    dtypes = CacheDtypes(kv=FP8, indexer=FP4)
    sparse = streams(spec_of("deepseek-v4-pro").layers[2], dtypes)
    assert (
        sparse["window"].entry_bytes,
        sparse["compressed"].entry_bytes,
        sparse["index"].entry_bytes,
    ) == (584, 584, 68)
    assert (
        streams(spec_of("deepseek-v4-pro").layers[2], CacheDtypes(kv=FP8))["index"].entry_bytes
        == 132
    )
    older = streams(spec_of("deepseek-v3.2").layers[0], CacheDtypes(kv=FP8))
    assert (older["latent"].entry_bytes, older["index"].entry_bytes) == (656, 132)
    assert (
        streams(spec_of("deepseek-v3").layers[0], CacheDtypes(kv=FP8))["latent"].entry_bytes == 576
    )


@pytest.mark.parametrize(
    ("layer", "fixed"),
    [
        (0, {"window": 131072, "compressor": 524288}),
        (2, {"window": 131072, "compressor": 65536, "index_compressor": 16384}),
    ],
)
def test_v4_states_have_the_published_sizes(layer: int, fixed: dict[str, int]) -> None:
    """Bytes of one layer at most, the token being computed included."""
    bounded = {
        name: s
        for name, s in streams(spec_of("deepseek-v4-pro").layers[layer]).items()
        if s.law.prefix is not None
    }
    assert {name: stream.law.span * stream.entry_bytes for name, stream in bounded.items()} == fixed


def test_v4_compressor_keeps_what_it_has_not_closed() -> None:
    sparse, heavy = (streams(spec_of("deepseek-v4-pro").layers[layer]) for layer in (2, 3))
    assert heavy["compressor"].needs(256) == ()
    assert heavy["compressor"].needs(300) == ((256, 300),)
    assert sparse["compressor"].needs(256) == ((252, 256),), (
        "the group before: the next entry looks back at it"
    )
    assert sparse["compressor"].needs(258) == ((252, 258),)


def test_dtypes_that_make_no_sense_are_refused() -> None:
    for wrong in ({"kv": FP4}, {"kv": "int3"}, {"state": FP8}, {"conv": FP8}, {"indexer": "uint8"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} dtype"):
            CacheDtypes(**wrong)
