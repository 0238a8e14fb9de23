"""Dtypes of what a cache keeps: names, what follows what, and sizes of entries."""

from __future__ import annotations

import pytest
import torch

from octavo.base import ConfigError
from octavo.spec.latent import index_stream
from octavo.spec.law import Everything, Snapshot
from octavo.spec.state import state_stream
from octavo.spec.stream import DTYPE_BYTES, FP4, FP8, CacheDtypes, Field, Stream, full_dtype


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_dtypes_have_the_names_and_sizes_of_torch(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == DTYPE_BYTES[dtype]


def test_short_names() -> None:
    short = ("fp32", "bf16", "fp16", "fp8", "fp4", "bfloat16", "int3")
    assert [full_dtype(name) for name in short] == [
        "float32",
        "bfloat16",
        "float16",
        FP8,
        FP4,
        "bfloat16",
        "int3",
    ]


@pytest.mark.parametrize(
    ("given", "index", "conv"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({"kv": "float32"}, "float32", "float32"),
        ({"kv": FP8}, FP8, "bfloat16"),
        ({"kv": FP8, "indexer": FP4, "conv": "float16"}, FP4, "float16"),
    ],
)
def test_what_is_not_given_follows_the_keys(given: dict[str, str], index: str, conv: str) -> None:
    dtypes = CacheDtypes(**given)
    assert (dtypes.index_keys, dtypes.conv_inputs, dtypes.state) == (index, conv, "float32")


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2 * 192), (FP8, 192 + 2 * 4), (FP4, 192 // 2 + 192 // 32)]
)
def test_index_keys_carry_a_scale_per_block(dtype: str, size: int) -> None:
    stream = index_stream(192, CacheDtypes(indexer=dtype), stride=4)
    assert (stream.entry_bytes, stream.stride, stream.law) == (size, 4, Everything())


def test_fp4_keys_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match="index_head_dim 7 is odd"):
        index_stream(7, CacheDtypes(indexer=FP4))


def test_a_state_is_one_entry_of_all_its_parts() -> None:
    dtypes = CacheDtypes(kv=FP8, state="bfloat16")
    stream = state_stream(
        dtypes, conv={"conv_q": (3, 8), "conv_k": (3, 8)}, kernel=4, recurrent=(3, 8, 5)
    )
    shapes = {"conv_q": (3, 8, 3), "conv_k": (3, 8, 3), "recurrent": (3, 8, 5)}
    assert {field.name: field.shape for field in stream.fields} == shapes
    assert {field.dtype for field in stream.fields} == {"bfloat16"}
    assert stream.law == Snapshot()
    assert [stream.bytes_needed(tokens) for tokens in (0, 1, 99)] == [
        0,
        stream.entry_bytes,
        stream.entry_bytes,
    ]


def test_an_entry_that_a_token_closes_itself_is_not_resident() -> None:
    stream = Stream(
        name="x", law=Everything(), fields=(Field(name="x", shape=(4,), dtype="uint8"),), stride=4
    )
    assert [stream.needs(n) for n in (3, 4, 7, 8)] == [(), ((0, 4),), ((0, 4),), ((0, 8),)]
    assert [stream.bytes_needed(n) for n in (3, 4, 7, 8)] == [0, 4, 4, 8]
