"""EngineConfig refuses wrong values by name; sizes read as people write them."""

from __future__ import annotations

import pytest

from octavo.base import ConfigError
from octavo.config import EngineConfig, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("500MB", 500_000_000),
        ("64kib", 65536),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text, "kv_memory") == size


@pytest.mark.parametrize("text", ["", "two", "2 Gigs", "-1GiB", 0, "0GiB"])
def test_wrong_sizes(text: int | str) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        parse_size(text, "kv_memory")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", ""),
        ("dtype", "int3"),
        ("kv_cache_dtype", "fp4"),
        ("indexer_cache_dtype", "int8"),
        ("device", "gpu"),
        ("kv_memory", 0),
        ("max_model_len", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", -1),
        ("seed", "one"),
    ],
)
def test_wrong_values_are_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        EngineConfig(**{"model": "m", option: value})  # type: ignore[arg-type]


def test_defaults_are_valid() -> None:
    assert EngineConfig(model="m").enable_prefix_caching
