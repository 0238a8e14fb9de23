"""How a layer's entry becomes the fields that its stream keeps, and back: plain dtypes, fp8 and fp4
with scales.

Owns the arithmetic of every quantised layout that ``spec/latent.py`` describes. Knows field names
and dtypes; knows no kind, no law and no batch. All of it works on one entry by itself, so what an
entry becomes never depends on its neighbours.

A block of elements shares a scale that is a power of two, also where it is stored in float32:
DeepSeek's models quantise so (``scale_fmt`` ue8m0 of their configs and ``inference/kernel.py``;
FlashMLA ``tests/quant.py``; OCP Microscaling Formats 1.0, section 6.3). Theirs is ``2 **
ceil(log2(largest / limit))``; here the largest element is first rounded to the element format's
precision, so that a decoded block finds its own scale again: ``encode(decode(encode(x)))`` is
``encode(x)``, bit by bit. The values that come out are alike, but for those below the coarser
scale's normal range, which keep a bit more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.base import UnsupportedError, ceil_div
from octavo.ops.paged import FieldView
from octavo.spec.latent import (
    COMPRESSED_FP8_BLOCK,
    INDEX_FP4_BLOCK,
    INDEX_FP8_BLOCK,
    SPARSE_FP8_BLOCK,
)
from octavo.spec.stream import Stream

_FP8, _FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
_EXPONENT = torch.float8_e8m0fnu

BLOCKS: Final = MappingProxyType(
    {
        ("latent", _FP8): SPARSE_FP8_BLOCK,
        ("kv", _FP8): COMPRESSED_FP8_BLOCK,
        ("key", _FP8): INDEX_FP8_BLOCK,
        ("key", _FP4): INDEX_FP4_BLOCK,
    }
)
"""Elements that share a scale, by field and dtype."""

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


def check(stream: Stream) -> None:
    """Raise UnsupportedError where a stream's fields are in dtypes that this module cannot fill."""
    for field in stream.fields:
        if getattr(torch, field.dtype) not in _FORMATS:
            continue
        if field.shard == "heads":
            raise UnsupportedError(
                f"{field.name} in {field.dtype} would need a scale for every head; use a plain"
                " cache dtype"
            )
        if field.name == "key":
            _check_rotation(field.shape[-1] * (2 if getattr(torch, field.dtype) is _FP4 else 1))


def encode(entry: Mapping[str, Tensor], fields: Mapping[str, FieldView]) -> dict[str, Tensor]:
    """An entry's parts, each [..., elements] of one leading shape, as ``fields`` keep them: by
    field, in the field's dtype.

    Plain fields are casts. Quantised ones are rounded to nearest, ties to even, and saturate; NaN
    stays NaN (in fp4, which has none, its whole block). Where ``kv`` is quantised, its last
    elements go to ``rope`` as they are; a quantised index key is rotated (``hadamard``). fp8 fields
    without scales are casts that saturate. Fields with a head axis are not quantised.
    """
    stored = {}
    for name, values in _parts(entry, fields).items():
        dtype = fields[name].data.dtype
        if dtype not in _FORMATS:
            stored[name] = values.to(dtype)
        elif "scale" not in fields:
            stored[name] = _fp8(values.float())
        else:
            turned = hadamard(values.float()) if name == "key" else values.float()
            stored[name], exponents = _quantise(turned, BLOCKS[name, dtype], dtype)
            stored["scale"] = _scales(exponents, fields["scale"].data)
    return stored


def decode(stored: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of ``encode`` in ``dtype``, from fields as they are stored: [..., elements] each.

    Exact in bfloat16 and wider for what is quantised. A quantised index key stays rotated, as
    ``match_queries`` makes queries.
    """
    entry = {}
    for name, kept in stored.items():
        if kept.dtype in _FORMATS and "scale" in stored:
            entry[name] = _dequantise(kept, stored["scale"], BLOCKS[name, kept.dtype]).to(dtype)
        elif name != "scale":
            entry[name] = kept.to(dtype)
    if "kv" in entry and "rope" in entry:
        entry["kv"] = torch.cat((entry["kv"], entry.pop("rope")), dim=-1)
    return entry


def passed(
    entry: Mapping[str, Tensor], fields: Mapping[str, FieldView]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what to store, the entry as a later step will read it) of fresh entries, whose parts have
    one dtype.
    """
    (dtype,) = {values.dtype for values in entry.values()}
    stored = encode(entry, fields)
    return stored, decode(stored, dtype=dtype)


def match_queries(queries: Tensor, fields: Mapping[str, FieldView]) -> Tensor:
    """Index queries [..., elements] for keys as ``fields`` keep them: rotated, where these are,
    else as given.
    """
    return hadamard(queries) if fields["key"].data.dtype in _FORMATS else queries


def hadamard(values: Tensor) -> Tensor:
    """[..., n] -> the same shape and dtype, times the n x n Hadamard matrix / sqrt(n)
    (Sylvester's): its own inverse.

    It spreads outliers over all elements, and dot products of what is rotated alike stay. Raises
    UnsupportedError where n is no power of two.
    """
    size = values.shape[-1]
    _check_rotation(size)
    turned, width = values.float(), 1
    while width < size:
        even, odd = turned.unflatten(-1, (-1, 2, width)).unbind(-2)
        turned, width = torch.stack((even + odd, even - odd), dim=-2).flatten(-3), width * 2
    return (turned / size**0.5).to(values.dtype)


def _check_rotation(size: int) -> None:
    if size < 1 or size & (size - 1):
        raise UnsupportedError(
            f"index_head_dim {size} is not a power of two; its quantised index keys cannot be"
            " rotated"
        )


def _parts(entry: Mapping[str, Tensor], fields: Mapping[str, FieldView]) -> dict[str, Tensor]:
    """The entry's parts under the fields' names: a ``kv`` that is kept in two fields is cut in
    two.
    """
    parts = dict(entry)
    if "kv" in entry and "rope" in fields:
        rotated = fields["rope"].data.shape[-1]
        parts["kv"], parts["rope"] = entry["kv"][..., :-rotated], entry["kv"][..., -rotated:]
    assert parts.keys() == fields.keys() - {"scale"}, "an entry's parts are its stream's fields"
    return parts


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


def _scales(exponents: Tensor, kept: Tensor) -> Tensor:
    """int32 exponents [..., blocks] as the scale field keeps them, zero bits behind the last where
    it is padded.
    """
    if kept.dtype is _EXPONENT:
        return pad(
            (exponents + _BIAS).to(torch.uint8), (0, kept.shape[-1] - exponents.shape[-1])
        ).view(_EXPONENT)
    assert kept.dtype is torch.float32 and kept.shape[-1] == exponents.shape[-1], (
        "scales are exponents or float32"
    )
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
