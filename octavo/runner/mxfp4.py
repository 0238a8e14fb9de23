"""MXFP4 weights: 4-bit floats in groups with a shared power of two (OCP Microscaling Formats 1.0,
sections 5.3 and 6.3).

Owns the arithmetic. Which tensors are so stored is ``runner/weights.py``'s business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.base import ConfigError
from octavo.ops.codec import e2m1

E8M0_BIAS = 127


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., groups, bytes], scales uint8 [..., groups] -> bfloat16 [..., groups *
    bytes * 2], exactly.

    A byte has the earlier value in its low half. Raises ConfigError where blocks and scales do not
    match.
    """
    if (
        blocks.shape[:-1] != scales.shape
        or blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
    ):
        raise ConfigError(
            f"MXFP4 blocks {blocks.dtype} {tuple(blocks.shape)} and scales {scales.dtype}"
            f" {tuple(scales.shape)} do not match"
        )
    exponents = scales.float() - E8M0_BIAS
    return (
        e2m1(blocks, torch.bfloat16) * torch.exp2(exponents).to(torch.bfloat16)[..., None]
    ).flatten(-2)
