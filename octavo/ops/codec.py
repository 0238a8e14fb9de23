"""How parts of an entry become the fields that a stream keeps, and back.

Owns ``Coder``, from which a plug-in derives its own, the arithmetic of ``spec.codec.Scaled``, and
``Entry``, all codecs of a stream together. Knows fields as their stream describes them; knows no
kind, no law and no step. All of it works on one entry by itself, so what an entry becomes never
depends on its neighbours.

A block of elements shares a scale that is a power of two, also where it is stored in float32:
DeepSeek's models quantise so (``scale_fmt`` ue8m0 of their configs and ``inference/kernel.py``;
FlashMLA ``tests/quant.py``; OCP Microscaling Formats 1.0, section 6.3). Theirs is ``2 **
ceil(log2(largest / limit))``; here the largest element is first rounded to the element format's
precision, so that a decoded block finds its own scale again: ``encode(decode(encode(x)))`` is
``encode(x)``, bit by bit. The values that come out are alike, but for those below the coarser
scale's normal range, which keep a bit more.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.base import UnsupportedError, ceil_div
from octavo.spec.codec import Codec, Scaled
from octavo.spec.stream import Field, Stream

_FP8, _FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
_EXPONENT = torch.float8_e8m0fnu

E2M1: Final = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Value of each 4-bit code: sign, two bits of exponent, one of mantissa."""

_BIAS, _LEAST, _MOST = 127, -126, 127
"""Of 8-bit exponents, and of float32's; scales stay normal numbers there."""


@dataclass(frozen=True)
class _Format:
    """A float format: its largest value is ``top * 2**shift``, with ``bits`` significant bits."""

    bits: int
    top: int
    shift: int

    @property
    def limit(self) -> float:
        return float(self.top << self.shift)


_FORMATS: Final = MappingProxyType({_FP8: _Format(4, 14, 5), _FP4: _Format(2, 3, 1)})


class Coder(ABC):
    """A field's codec at work: made once per field of a stream as ``Class(codec, field, stream)``.

    Both ways work on the last axis alone. ``decode`` of ``encode`` is what a layer computes with,
    whether it comes from pages or is the step's own; encoding that again must change nothing, or a
    prompt cut differently would give other numbers.
    """

    scaled: tuple[str, int] | None = None
    """(field of scales, elements of a block) where elements are floats in blocks with a scale, as
    ``spec.codec.Scaled`` says, so that kernels may read them without ``decode``.
    """

    cast: bool = False
    """Whether elements are the numbers, in the field's dtype; kernels may read them, too."""

    def __init__(self, codec: Codec | None, field: Field, stream: Stream) -> None:
        self.field = field

    @property
    def size(self) -> int:
        """How many elements of its part the field keeps."""
        return self.field.shape[-1]

    @abstractmethod
    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Elements [..., size] -> what its field and those beside it keep, by name, in their
        dtypes: [..., *] each.
        """

    @abstractmethod
    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The inverse, from the same fields: [..., size] in float32."""

    def match(self, queries: Tensor) -> Tensor:
        """Vectors [..., size] as they are to be multiplied with what ``decode`` gives."""
        return queries


class Cast(Coder):
    """fp8 without scales: a cast that saturates."""

    cast = True

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """As ``Coder``."""
        return {self.field.name: _fp8(values.float())}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """As ``Coder``."""
        return stored[self.field.name].float()


class ScaledCoder(Coder):
    """``spec.codec.Scaled``: rounded to nearest, ties to even, saturating. NaN stays NaN, in fp4,
    which has none, as its whole block.
    """

    def __init__(self, codec: Scaled, field: Field, stream: Stream) -> None:
        super().__init__(codec, field, stream)
        self.codec, self.dtype = codec, getattr(torch, field.dtype)
        (scales,) = (one for one in stream.fields if one.name == codec.scale)
        self.scaled = codec.scale, codec.block
        self._scales = getattr(torch, scales.dtype), scales.shape[-1]
        if codec.turned and not _is_power(self.size):
            raise UnsupportedError(
                f"{stream.name} keys of {self.size} elements, not a power of two, cannot be rotated"
                " as their quantised form asks"
            )

    @property
    def size(self) -> int:
        """As ``Coder``; fp4 has two elements in a byte."""
        return self.field.shape[-1] * (2 if self.dtype is _FP4 else 1)

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """As ``Coder``."""
        turned = hadamard(values.float()) if self.codec.turned else values.float()
        kept, exponents = _quantise(turned, self.codec.block, self.dtype)
        return {self.field.name: kept, self.codec.scale: _scales(exponents, *self._scales)}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """As ``Coder``. What is kept rotated stays so."""
        kept, scales = stored[self.field.name], stored[self.codec.scale]
        return _dequantise(kept, scales, self.codec.block)

    def match(self, queries: Tensor) -> Tensor:
        """As ``Coder``."""
        return hadamard(queries) if self.codec.turned else queries


def coder_of(field: Field, stream: Stream) -> Coder | None:
    """What encodes a field; None where its dtype says all. Raises UnsupportedError for what cannot
    be filled.
    """
    if field.codec is not None:
        module, _, name = field.codec.coder.partition(":")
        made: Coder = getattr(importlib.import_module(module), name)(field.codec, field, stream)
        return made
    dtype = getattr(torch, field.dtype)
    if dtype is _FP4 or (dtype is _FP8 and field.shard == "heads"):
        raise UnsupportedError(
            f"{field.name} in {field.dtype} would need a scale for every head; use a plain cache"
            " dtype"
        )
    return Cast(None, field, stream) if dtype is _FP8 else None


@dataclass(frozen=True)
class Piece:
    """A field that keeps elements of a part. coder: None where it is a cast."""

    name: str
    dtype: torch.dtype
    coder: Coder | None
    size: int


class Entry:
    """All codecs of one stream: parts of entries to fields and back.

    plain: whether every part is one field of numbers as they are. Raises UnsupportedError for a
        stream whose fields cannot be filled.
    """

    def __init__(self, stream: Stream) -> None:
        self.parts = {
            part: tuple(_piece(field, stream) for field in fields)
            for part, fields in stream.parts.items()
        }
        pieces = [piece for pieces in self.parts.values() for piece in pieces]
        self._fields = {
            part: tuple(
                name
                for field in fields
                for name in (field.name, *(field.codec.beside if field.codec else ()))
            )
            for part, fields in stream.parts.items()
        }
        self.plain = len(pieces) == len(self.parts) and all(one.coder is None for one in pieces)

    def encode(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parts of entries, [..., elements] of one leading shape, as fields keep them: by field, in
        the field's dtype.
        """
        assert parts.keys() == self.parts.keys(), "an entry's parts are its stream's"
        stored: dict[str, Tensor] = {}
        for part, pieces in self.parts.items():
            values = parts[part]
            cut = values.split([one.size for one in pieces], -1) if len(pieces) > 1 else (values,)
            for piece, some in zip(pieces, cut, strict=True):
                if piece.coder is None:
                    stored[piece.name] = some.to(piece.dtype)
                else:
                    stored.update(piece.coder.encode(some))
        return stored

    def decode(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The inverse in ``dtype``, from fields as they are stored."""
        return {part: self.decode_part(part, stored, dtype) for part in self.parts}

    def decode_part(self, part: str, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """One part, from at least the fields of ``fields_of``."""
        found = [
            (stored[one.name] if one.coder is None else one.coder.decode(stored)).to(dtype)
            for one in self.parts[part]
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def fields_of(self, part: str) -> tuple[str, ...]:
        """Names of the fields that hold a part, scales included."""
        return self._fields[part]

    def match(self, part: str, queries: Tensor) -> Tensor:
        """Vectors [..., elements] as they are to be multiplied with a decoded part."""
        pieces = self.parts[part]
        cut = queries.split([piece.size for piece in pieces], dim=-1)
        made = [
            some if piece.coder is None else piece.coder.match(some)
            for piece, some in zip(pieces, cut, strict=True)
        ]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)


def _piece(field: Field, stream: Stream) -> Piece:
    coder, dtype = coder_of(field, stream), getattr(torch, field.dtype)
    return Piece(field.name, dtype, coder, coder.size if coder else field.shape[-1])


def hadamard(values: Tensor) -> Tensor:
    """[..., n] -> the same shape and dtype, times the n x n Hadamard matrix / sqrt(n)
    (Sylvester's): its own inverse.

    It spreads outliers over all elements, and dot products of what is rotated alike stay. n is a
    power of two.
    """
    size = values.shape[-1]
    assert _is_power(size), f"{size} is no power of two"
    turned, width = values.float(), 1
    while width < size:
        even, odd = turned.unflatten(-1, (-1, 2, width)).unbind(-2)
        turned, width = torch.stack((even + odd, even - odd), dim=-2).flatten(-3), width * 2
    return (turned / size**0.5).to(values.dtype)


def _is_power(size: int) -> bool:
    return size > 0 and not size & (size - 1)


def _blocks(values: Tensor, block: int) -> Tensor:
    """[..., n] -> [..., blocks, block], zeros behind the last element."""
    size = values.shape[-1]
    return pad(values, (0, ceil_div(size, block) * block - size)).unflatten(-1, (-1, block))


def _power(exponents: Tensor) -> Tensor:
    """2 to int32 exponents within float32's normal range, exactly."""
    return ((exponents + _BIAS) << 23).view(torch.float32)


def _quantise(values: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 [..., n] -> (elements of ``dtype`` [..., n], or [..., n / 2] in fp4; int32 exponents
    [..., blocks]).

    A block of fp4 with NaN has exponent ``_MOST + 1``.
    """
    form, blocks = _FORMATS[dtype], _blocks(values, block)
    largest = blocks.nan_to_num(0.0).abs().amax(-1)
    mantissa, exponents = torch.frexp(largest)
    above = torch.round(mantissa * (1 << form.bits)) > form.top
    exponents = (
        (exponents - form.bits - form.shift + above)
        .clamp(_LEAST, _MOST - form.bits - form.shift)
        .int()
    )
    scaled = (blocks * _power(-exponents)[..., None]).flatten(-2)[..., : values.shape[-1]]
    if dtype is _FP8:
        return _fp8(scaled), exponents
    return _fp4(scaled), torch.where(blocks.isnan().any(-1), _MOST + 1, exponents)


def _fp8(values: Tensor) -> Tensor:
    """float32 -> float8_e4m3fn, saturating. Zeros are positive, whatever rounding made of them."""
    limit = _FORMATS[_FP8].limit
    rounded = values.clamp(-limit, limit).to(_FP8)
    return torch.where(rounded.view(torch.uint8) == 0x80, 0, rounded.view(torch.uint8)).view(_FP8)


def _fp4(values: Tensor) -> Tensor:
    """float32 [..., 2 n] -> float4_e2m1fn_x2 [..., n], saturating; the earlier of two is in the low
    half of a byte.
    """
    size = values.nan_to_num(0.0).abs().clamp(max=_FORMATS[_FP4].limit)
    # Spacing is 0.5 up to 2, 1 up to 4, then 2; a tie at which a code is even is one at which the
    # quotient is.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = torch.round(size / step) * step
    codes = torch.where(
        rounded < 2, rounded * 2, torch.where(rounded < 4, rounded + 2, rounded / 2 + 4)
    ).to(torch.uint8)
    codes = codes | ((values < 0) & (codes > 0)).to(torch.uint8) << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(_FP4)


def _scales(exponents: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """int32 exponents [..., blocks] as a scale field of ``width`` elements keeps them, zero bits
    behind the last where it is padded.
    """
    blocks = exponents.shape[-1]
    if dtype is _EXPONENT:
        return pad((exponents + _BIAS).to(torch.uint8), (0, width - blocks)).view(_EXPONENT)
    assert dtype is torch.float32 and width == blocks, "scales are exponents or float32"
    return _power(exponents)


def _dequantise(kept: Tensor, scales: Tensor, block: int) -> Tensor:
    """Elements and their scales -> float32."""
    values = e2m1(kept.view(torch.uint8)) if kept.dtype is _FP4 else kept.float()
    size = values.shape[-1]
    count = ceil_div(size, block)
    return (_blocks(values, block) * scales[..., :count].float()[..., None]).flatten(-2)[..., :size]


def e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., n] -> [..., 2 n]: two 4-bit floats in a byte, the earlier in its low half."""
    values = torch.tensor(E2M1, dtype=dtype, device=packed.device)
    return torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), dim=-1).flatten(
        -2
    )
