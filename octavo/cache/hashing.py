"""Names of prefixes: one 128-bit key per hash unit.

Owns how tokens become keys. Knows no pages. A key stands for all tokens up to the end of its unit
and for everything else that changes the bytes (the salt of its root).

Keys are multilinear: in each of two lanes the sum, modulo 2^64, of every token plus one times a
secret random number of its position, begun at the root. One pass over the tokens makes all of them,
and a longer prompt goes on from its last key. Two prefixes that differ have one key with
probability 2^-(128 - 2 k) at most, where 2^k is the largest power of two that divides
the difference of the tokens at some place: 2^-94 for vocabularies below 2^18 (Dietzfelbinger 1996;
Lemire and Kaser 2014). The bound holds whatever the tokens are, so a stranger who does not know the
server's secret cannot prepare a collision.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_128_digest

KEY = np.dtype("V16")
"""Keys in arrays; ``tolist`` and ``tobytes`` make the bytes that dictionaries use."""

NO_KEYS = np.zeros(0, KEY)

_LANES = 2

_BLOCK = 2048
"""Units hashed at a time, in buffers that stay: fresh memory would have to be mapped first."""


def root_key(*salts: bytes, seed: int) -> bytes:
    """The key of the empty prefix: changes with any salt (model, cache dtype, layout, adapter,
    tenant).
    """
    sized = b"".join(len(salt).to_bytes(8, "little") + salt for salt in salts)
    return xxh3_128_digest(sized, seed)


class PrefixHasher:
    """Makes keys of units of ``unit`` tokens. seed: the server's secret."""

    def __init__(self, *, unit: int, seed: int) -> None:
        self._unit = unit
        self._streams = [np.random.Philox(key=[seed % 2**64, lane]) for lane in range(_LANES)]
        self._factors = np.zeros((_LANES, 0, unit), np.uint64)
        self._words, self._sums = np.empty((_BLOCK, unit), np.uint64), np.empty(_BLOCK, np.uint64)

    def extend(self, keys: np.ndarray, tokens: np.ndarray, *, root: bytes) -> np.ndarray:
        """``keys`` (KEY [K]), and those of all further whole units of ``tokens`` (int32, from
        position 0).
        """
        known, units = len(keys), len(tokens) // self._unit
        if units <= known:
            return keys
        self._grow(units)
        lanes = np.empty((units, _LANES), np.uint64)
        lanes[:known] = keys.view(np.uint64).reshape(-1, _LANES)
        last = lanes[known - 1] if known else np.frombuffer(root, np.uint64)
        for first in range(known, units, _BLOCK):
            stop = min(first + _BLOCK, units)
            words, sums = self._words[: stop - first], self._sums[: stop - first]
            words[:] = tokens[first * self._unit : stop * self._unit].reshape(words.shape)
            words += np.uint64(1)
            for lane in range(_LANES):
                np.einsum("ut,ut->u", words, self._factors[lane, first:stop], out=sums)
                sums[:1] += last[lane : lane + 1]
                np.add.accumulate(sums, out=lanes[first:stop, lane])
            last = lanes[stop - 1]
        return lanes.view(KEY).reshape(-1)

    def _grow(self, units: int) -> None:
        have = self._factors.shape[1]
        if units > have:
            count = max(units - have, have, 256)
            drawn = [
                stream.random_raw(count * self._unit).reshape(count, self._unit)
                for stream in self._streams
            ]
            self._factors = np.concatenate([self._factors, np.array(drawn, np.uint64)], axis=1)
