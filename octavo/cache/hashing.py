"""Names of prefixes: one chained 128-bit key per hash unit.

Owns how tokens become keys. Knows no pages. A key stands for all tokens up to the end of its unit and for everything else
that changes the bytes (the salt of its root). xxh3 is seeded by a per-server secret, so that a stranger cannot prepare a
collision.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_128_digest


def root_key(*salts: bytes, seed: int) -> bytes:
    """The key of the empty prefix: changes with any salt (model, cache dtype, layout, adapter, tenant)."""
    sized = b"".join(len(salt).to_bytes(8, "little") + salt for salt in salts)
    return xxh3_128_digest(sized, seed)


def extend_keys(keys: list[bytes], tokens: np.ndarray, *, unit: int, root: bytes, seed: int) -> None:
    """Append the keys of all whole units of ``tokens`` (int32, from position 0) that ``keys`` lacks."""
    raw, width = tokens[len(keys) * unit :].astype("<i4", copy=False).tobytes(), unit * 4
    last = keys[-1] if keys else root
    for start in range(0, len(raw) // width * width, width):
        last = xxh3_128_digest(last + raw[start : start + width], seed)
        keys.append(last)
