"""What is remembered: the byte fields of one stream of one layer.

Owns dtypes, which content is kept in which of them, and entry sizes. Knows no kinds and no blocks;
``spec/group.py`` lays entries out in pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from octavo.base import ConfigError, Interval, floor_to
from octavo.spec.codec import Codec
from octavo.spec.law import Law

DTYPE_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes of an element, by torch's name of the dtype. An element of ``float4_e2m1fn_x2`` is two
numbers.
"""

FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn_x2"

_PLAIN: Final = ("float32", "bfloat16", "float16")
_SHORT: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": FP8, "fp4": FP4}


def full_dtype(name: str) -> str:
    """torch's name of a dtype that may be given in short, such as ``bf16``; other names pass as
    they are.
    """
    return _SHORT.get(name, name)


@dataclass(frozen=True, kw_only=True)
class CacheDtypes:
    """In which dtype a cache keeps what.

    kv: keys, values, latents and compressed entries. indexer: index keys; None means as ``kv``.
    conv: past inputs of short convolutions, which are activations; None means as ``kv``, or
    bfloat16 where that is quantised. state: recurrent states and open groups of compressors. How a
    quantised entry is laid out, and where its scales are, is up to each kind.

    Raises ConfigError for a dtype that the content cannot be kept in.
    """

    kv: str = "bfloat16"
    indexer: str | None = None
    conv: str | None = None
    state: str = "float32"

    def __post_init__(self) -> None:
        allowed = {
            "kv": (*_PLAIN, FP8),
            "indexer": (*_PLAIN, FP8, FP4),
            "conv": _PLAIN,
            "state": _PLAIN,
        }
        for name, known in allowed.items():
            given = getattr(self, name)
            if given is not None and given not in known:
                raise ConfigError(
                    f"{name} dtype {given!r} is not possible; possible: {', '.join(known)}"
                )

    @property
    def index_keys(self) -> str:
        """Dtype of index keys."""
        return self.indexer or self.kv

    @property
    def conv_inputs(self) -> str:
        """Dtype of the past inputs of short convolutions."""
        return self.conv or (self.kv if self.kv in _PLAIN else "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One array of a stream's entry.

    shape: elements of one entry, the head axis first where ``shard`` is ``heads``. In a page the
        head axis is outermost, then the entries of the block, then the rest, so that one head's
        entries lie together.
    shard: how tensor parallelism would cut it; offsets are alike on all ranks.
    part: the part of an entry that it keeps elements of, by default the one of its own name.
        Several
        fields may keep one part: its first elements lie in the first of them, and so on.
    codec: what its elements mean; None: they are the numbers, cast to ``dtype``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Literal["heads", "replicated"] = "replicated"
    part: str = ""
    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"field {self.name}: dtype {self.dtype!r} is unknown; known:"
                f" {', '.join(DTYPE_BYTES)}"
            )
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

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        for field in self.fields:
            for name in field.codec.beside if field.codec else ():
                if names.count(name) != 1:
                    raise ConfigError(
                        f"stream {self.name}: the codec of {field.name} fills {name}, which is no"
                        " field of it"
                    )

    @property
    def parts(self) -> dict[str, tuple[Field, ...]]:
        """What layers speak of: the parts of an entry, and the fields that keep each, in order."""
        beside = {name for field in self.fields if field.codec for name in field.codec.beside}
        found: dict[str, tuple[Field, ...]] = {}
        for field in self.fields:
            if field.name not in beside:
                part = field.part or field.name
                found[part] = (*found.get(part, ()), field)
        return found

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, without padding."""
        return sum(field.entry_bytes for field in self.fields)

    def needs(self, n: int) -> tuple[Interval, ...]:
        """``law.needs(n)`` cut to whole entries: an entry that token n itself closes is fresh, not
        resident.
        """
        cut = ((start, floor_to(stop, self.stride)) for start, stop in self.law.needs(n))
        return tuple((start, stop) for start, stop in cut if stop > start)

    def bytes_needed(self, n: int) -> int:
        """Bytes of the entries of ``needs(n)``, before any rounding to blocks."""
        return (
            sum((stop - start) // self.stride for start, stop in self.needs(n)) * self.entry_bytes
        )
