"""What is remembered: the byte fields of one stream of one layer.

Owns dtypes and entry sizes. Knows no kinds and no blocks; ``spec/group.py`` lays entries out in pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from octavo.base import ConfigError, Interval, floor_to
from octavo.spec.law import Law

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of an element, by torch's name of the dtype."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One array of a stream's entry.

    shape: elements of one entry, the head axis first where ``shard`` is ``heads``. In a page the head axis is outermost, then
        the entries of the block, then the rest, so that one head's entries lie together.
    shard: how tensor parallelism would cut it; offsets are alike on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Literal["heads", "replicated"] = "replicated"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"field {self.name}: dtype {self.dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}")
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"field {self.name}: shape {self.shape} must have positive sizes")

    @property
    def entry_bytes(self) -> int:
        """Bytes of this field in one entry."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What (fields), every how many tokens (stride), and how long (law) one layer remembers."""

    name: str
    law: Law
    fields: tuple[Field, ...]
    stride: int = 1

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, without padding."""
        return sum(field.entry_bytes for field in self.fields)

    def needs(self, n: int) -> tuple[Interval, ...]:
        """``law.needs(n)`` cut to whole entries: an entry that token n itself closes is fresh, not resident."""
        cut = ((start, floor_to(stop, self.stride)) for start, stop in self.law.needs(n))
        return tuple((start, stop) for start, stop in cut if stop > start)

    def bytes_needed(self, n: int) -> int:
        """Bytes of the entries of ``needs(n)``, before any rounding to blocks."""
        return sum((stop - start) // self.stride for start, stop in self.needs(n)) * self.entry_bytes
