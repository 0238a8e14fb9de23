"""Weights of which whole blocks share a scale: fp8 in square blocks, and fp4 in groups of 32
(DeepSeek-V3, V3.2, V4).

Owns which tensors of a checkpoint are so stored, told by name and dtype, and their dequantisation.
Fused MXFP4 experts of gpt-oss are ``runner/weights.py``'s. DeepSeek publishes V3's scales as
``X.weight_scale_inv`` (factors, whatever the name says) in float32, V4's as ``X.scale`` in float32
or as 8-bit exponents; V4's fp4 experts are two numbers in an int8, with exponents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from octavo.base import ConfigError, ceil_div
from octavo.runner.mxfp4 import dequantise

Handles = Mapping[str, safe_open]
"""Which open file has the tensor of a name."""

Block = tuple[int, int]
"""Rows and columns that share a scale."""

GROUP = 32
"""Numbers of fp4 that share a scale."""


def scales_of(name: str, where: Handles) -> str | None:
    """Name of the tensor with the scales of ``name``, or None where it has none."""
    for scales in (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"):
        if scales in where and scales != name:
            return scales
    return None


def are_scales(name: str, where: Handles) -> bool:
    """Is this a tensor that ``read`` uses for another one?"""
    return any(
        name.endswith(suffix) and f"{name.removesuffix(suffix)}{weight}" in where
        for suffix, weight in (("_scale_inv", ""), (".scale", ".weight"))
    )


def read(name: str, where: Handles, block: Block) -> Tensor:
    """The tensor ``name``, dequantised to float32 or, of fp4, to bfloat16, where it is quantised.

    Raises ConfigError naming it where its scales are missing or do not match.
    """
    tensor: Tensor = where[name].get_tensor(name)
    scales = scales_of(name, where)
    if scales is None:
        if tensor.dtype is torch.float8_e4m3fn:
            raise ConfigError(
                f"tensor {name} is fp8, and the checkpoint has neither {name}_scale_inv nor a"
                " .scale for it"
            )
        return tensor
    if tensor.dtype is torch.int8:
        return _fp4(name, tensor, where[scales].get_tensor(scales))
    if tensor.dtype is not torch.float8_e4m3fn:
        raise ConfigError(
            f"tensor {name} has scales {scales}, but is {tensor.dtype}; octavo dequantises fp8 and"
            " packed fp4"
        )
    return _fp8(name, tensor, where[scales].get_tensor(scales), block)


def _fp8(name: str, tensor: Tensor, scales: Tensor, block: Block) -> Tensor:
    """float8 [..., rows, columns] and scales [..., blocks, blocks] -> float32. The last blocks of
    each may be cut.
    """
    rows, columns = tensor.shape[-2:]
    _match(
        name,
        tensor,
        scales,
        (*tensor.shape[:-2], ceil_div(rows, block[0]), ceil_div(columns, block[1])),
    )
    wide = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return tensor.float() * wide.repeat_interleave(block[1], -1)[..., :columns]


def _fp4(name: str, tensor: Tensor, scales: Tensor) -> Tensor:
    """int8 [..., rows, columns / 2] and 8-bit exponents [..., rows, columns / 32] -> bfloat16 [...,
    rows, columns].
    """
    if scales.dtype is not torch.float8_e8m0fnu:
        raise ConfigError(
            f"the scales of fp4 tensor {name} are {scales.dtype}; they must be float8_e8m0fnu"
        )
    columns = tensor.shape[-1] * 2
    groups = ceil_div(columns, GROUP)
    _match(name, tensor, scales, (*tensor.shape[:-1], groups))
    packed = pad(tensor.view(torch.uint8), (0, (groups * GROUP - columns) // 2)).unflatten(
        -1, (groups, -1)
    )
    return dequantise(packed, scales.view(torch.uint8))[..., :columns]


def _match(name: str, tensor: Tensor, scales: Tensor, asked: tuple[int, ...]) -> None:
    if tuple(scales.shape) != asked:
        raise ConfigError(
            f"tensor {name} has shape {tuple(tensor.shape)}; its scales {tuple(scales.shape)} must"
            f" be {asked}"
        )
