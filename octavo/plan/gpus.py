"""Memory of known GPUs, and what is left of it for caches.

Owns the table and the arithmetic from GPUs and weights to arena bytes. Knows no model beyond its
number of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from octavo.base import CapacityError, ConfigError, UnsupportedError

MIB = 2**20

GPUS: Mapping[str, int] = MappingProxyType(
    {
        "l4": 23034 * MIB,
        "l40s": 46068 * MIB,
        "a100-40gb": 40960 * MIB,
        "a100": 81920 * MIB,
        "h100": 81559 * MIB,
        "h200": 143771 * MIB,
        "b200": 183359 * MIB,
        "rtx4090": 24564 * MIB,
        "rtx5090": 32607 * MIB,
        "mi300x": 196592 * MIB,
    }
)
"""Bytes of memory that a GPU's driver reports, by its name in lower case."""

CACHE_SHARE = 0.85
"""Part of what weights leave free that the arena takes, as the engine does unless told."""

_METHOD_BITS: Mapping[str, float] = MappingProxyType(
    {
        "fp8": 8,
        "fbgemm_fp8": 8,
        "modelopt": 8,
        "mxfp4": 4.25,
        "nvfp4": 4.5,
        "int8": 8,
        "bitsandbytes_4bit": 4.5,
    }
)
"""Bits of a weight, scales included, by ``quant_method``; others say themselves how many."""

_DTYPE_BITS: Mapping[str, int] = MappingProxyType({"float32": 32, "bfloat16": 16, "float16": 16})


def gpu_memory(name: str) -> int:
    """Bytes of a GPU. Raises UnsupportedError listing those that are known."""
    if name.lower() not in GPUS:
        raise UnsupportedError(
            f"gpu {name!r} is not known; known: {', '.join(GPUS)}; or give memory for the cache"
            " itself"
        )
    return GPUS[name.lower()]


def weight_bits(config: Mapping[str, Any]) -> float:
    """Bits of one weight by the config's ``quantization_config``, else its dtype, else 16.

    Every weight is taken to be quantised. Raises UnsupportedError for a method whose size is not
    known.
    """
    quantised = config.get("quantization_config")
    if not quantised:
        return _DTYPE_BITS.get(
            str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 16
        )
    method = str(quantised.get("quant_method", "unknown"))
    if method == "bitsandbytes":
        method = "bitsandbytes_4bit" if quantised.get("load_in_4bit") else "int8"
    if method in _METHOD_BITS:
        return _METHOD_BITS[method]
    bits = quantised.get("bits", quantised.get("w_bit"))
    if not isinstance(bits, int):
        raise UnsupportedError(
            f"quantization_config.quant_method {method!r} does not say how large a weight is; give"
            " weights"
        )
    # A scale and a zero point in 16 bits for each group of weights.
    group = quantised.get("group_size") or 128
    return bits + (32 / group if group > 0 else 0)


def cache_bytes(device: int, weights: int, tp: int) -> int:
    """Arena bytes of one of ``tp`` devices that hold ``weights`` together. Raises CapacityError
    where they do not fit.
    """
    free = device - weights // tp
    if free <= 0:
        raise CapacityError(
            f"the weights need {weights / tp / 2**30:.1f} GiB on each of {tp} GPUs, which have"
            f" {device / 2**30:.1f} GiB; raise count and tp"
        )
    return int(free * CACHE_SHARE)


def check_parallel(count: int, tp: int) -> None:
    """Raise ConfigError unless ``count`` GPUs make whole copies of ``tp`` each."""
    if count < 1 or tp < 1 or count % tp:
        raise ConfigError(f"count {count} must be a positive multiple of tp {tp}")
