"""Options of an engine, checked in one place.

Owns ``EngineConfig``, and the reading and writing of sizes such as ``2GiB``. Knows names and ranges
only: no model, no device, no memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from octavo.base import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
"""Values of ``dtype``; ``auto`` is float32 on a CPU and bfloat16 on a GPU."""

KV_CACHE_DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8")
"""Values of ``kv_cache_dtype``; ``auto`` is the model's own."""

INDEXER_CACHE_DTYPES = (*KV_CACHE_DTYPES, "fp4")
"""Values of ``indexer_cache_dtype``; ``auto`` is as ``kv_cache_dtype``."""

SIZE_UNITS = MappingProxyType(
    {
        "": 1,
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
)
"""Bytes of every unit that a size may be written in, upper case."""


def format_size(count: float) -> str:
    """Bytes as people read them: ``16.9 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_size(value: int | str, name: str) -> int:
    """Bytes of ``2GiB``, ``500MB`` or a plain count. Raises ConfigError naming the argument."""
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in SIZE_UNITS:
            raise ConfigError(
                f"{name} {value!r} is not a size; write it like 2GiB, 500MB or a number of bytes"
            )
        size = int(float(match[1]) * SIZE_UNITS[match[2].upper()])
    if size < 1:
        raise ConfigError(f"{name} must be at least one byte, not {value!r}")
    return size


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may choose. Cannot exist with a wrong value.

    model: directory, GGUF file or Hub id.
    kv_cache_dtype: of keys, values, latents and compressed entries. indexer_cache_dtype: of index
        keys.
    kv_memory: bytes of the arena; None takes a share of what is free once the weights are loaded.
    max_model_len: tokens of prompt and output together; None is the model's own limit.
    max_num_batched_tokens: tokens computed in one step over all requests. max_num_seqs: requests in
        one step.
    checkpoint_interval: tokens between regular resume points of layers that let go; None makes
        none.
    eviction: which remembered prefixes go first, by the name of a policy
        (``octavo/cache/index/policy.py``).
    seed: of requests that bring none, so that equal ones get equal answers; None makes them differ
        each time. plugins: modules, or their names, with further kinds, families and backends.
    dump_dir: folder for what is left behind where the scheduler breaks; ``auto`` is octavo's own
        below the user's state folder, ``none`` leaves nothing.
    """

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    indexer_cache_dtype: str = "auto"
    kv_memory: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    checkpoint_interval: int | None = None
    eviction: str = "worth"
    seed: int | None = None
    device: str = "auto"
    plugins: tuple[ModuleType | str, ...] = ()
    dump_dir: str = "auto"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise ConfigError for the first wrong value, naming it and what would be right."""
        if not self.model:
            raise ConfigError(
                "model must be a directory, a .gguf file or a Hub id, not an empty string"
            )
        for name, known in (
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("indexer_cache_dtype", INDEXER_CACHE_DTYPES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                )
        if not self.dump_dir:
            raise ConfigError("dump_dir must be a folder, auto or none, not an empty string")
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        for name in (
            "kv_memory",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "checkpoint_interval",
        ):
            value = getattr(self, name)
            optional = name in ("kv_memory", "max_model_len", "checkpoint_interval")
            if not (value is None and optional) and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
