"""Rotary position embedding: frequencies and tables of ``Ops.rotate``.

Owns the formulas of ``default`` (Su et al. 2021), ``linear``, ``llama3`` and ``yarn`` (Peng et al.
2023) scaling as Transformers' ``modeling_rope_utils`` writes them, operation by operation, so that
float32 results agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.spec.rope import RopeParams


def frequencies(params: RopeParams, dim: int, device: torch.device | str) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [rotated / 2], factor of cos and sin) of heads of ``dim``
    elements.
    """
    dim = params.rotated(dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    if params.rope_type == "yarn":
        return _yarn(params, params.theta**exponents, dim)
    inverse = 1.0 / params.theta**exponents
    if params.rope_type == "linear":
        inverse = inverse / params.factor
    elif params.rope_type == "proportional":
        inverse[int(params.partial_rotary_factor * dim // 2) :] = 0
        inverse = inverse / params.factor
    elif params.rope_type == "llama3":
        inverse = _llama3(params, inverse)
    return inverse, 1.0


def _llama3(params: RopeParams, inverse: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between interpolated."""
    old, low, high = (
        params.original_max_position_embeddings,
        params.low_freq_factor,
        params.high_freq_factor,
    )
    wave = 2 * math.pi / inverse
    stretched = torch.where(wave > old / low, inverse / params.factor, inverse)
    smooth = (old / wave - low) / (high - low)
    between = (1 - smooth) * stretched / params.factor + smooth * stretched
    return torch.where((wave < old / high) | (wave > old / low), stretched, between)


def _yarn(params: RopeParams, positions: Tensor, dim: int) -> tuple[Tensor, float]:
    """A linear ramp over the dimensions between extrapolation and interpolation."""

    def correction(rotations: float) -> float:
        old = params.original_max_position_embeddings
        return dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(params.theta))

    def magnitude(weight: float) -> float:
        return 1.0 if params.factor <= 1 else 0.1 * weight * math.log(params.factor) + 1.0

    low, high = correction(params.beta_fast), correction(params.beta_slow)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp(
        (torch.arange(dim // 2, dtype=torch.float32, device=positions.device) - low) / (high - low),
        0,
        1,
    )
    keep = 1 - ramp
    inverse = 1.0 / (params.factor * positions) * (1 - keep) + 1.0 / positions * keep
    if params.attention_factor is not None:
        return inverse, params.attention_factor
    if params.mscale and params.mscale_all_dim:
        return inverse, magnitude(params.mscale) / magnitude(params.mscale_all_dim)
    return inverse, magnitude(1.0)


def tables(
    params: RopeParams, dim: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, rotated] in ``dtype`` at int64 ``positions`` [T]; angles in float32."""
    inverse, factor = frequencies(params, dim, positions.device)
    angles = positions[:, None].float() * inverse
    both = (
        angles.repeat_interleave(2, dim=-1)
        if params.interleaved
        else torch.cat((angles, angles), dim=-1)
    )[:, None]
    return (both.cos() * factor).to(dtype), (both.sin() * factor).to(dtype)
