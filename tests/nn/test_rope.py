"""Rotation of whole heads and of their fronts, halves and neighbours, against complex
multiplication.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.nn.rope import frequencies, tables
from octavo.ops.torch.pointwise import rotate
from octavo.spec.rope import RopeParams

POSITIONS = torch.tensor([0, 1, 17, 4096])


def turned(x: Tensor, params: RopeParams) -> Tensor:
    """Every pair of the rotated front as one complex number, times ``exp(i * position *
    frequency)``.
    """
    size = params.rotated(x.shape[-1])
    front = x[..., :size].double()
    pairs = (
        front.unflatten(-1, (-1, 2))
        if params.interleaved
        else front.unflatten(-1, (2, -1)).transpose(-1, -2)
    )
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    angles = POSITIONS[:, None].double() / params.theta**exponents
    spun = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    flat = spun.flatten(-2) if params.interleaved else spun.transpose(-1, -2).flatten(-2)
    return torch.cat((flat.float(), x[..., size:]), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.26])
def test_rotation_is_complex_multiplication(interleaved: bool, part: float) -> None:
    params = RopeParams(theta=100.0, partial_rotary_factor=part, interleaved=interleaved)
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = tables(params, 16, POSITIONS, torch.float32)
    assert (
        cos.shape == (4, 1, params.rotated(16))
        and params.rotated(16) == {1.0: 16, 0.5: 8, 0.26: 4}[part]
    )
    torch.testing.assert_close(
        rotate(x, cos, sin, interleaved=interleaved), turned(x, params), rtol=0, atol=2e-3
    )


def test_a_part_has_the_frequencies_of_a_head_of_its_size() -> None:
    for kind in ("default", "yarn", "llama3"):
        whole = RopeParams(
            theta=100.0, rope_type=kind, factor=4.0, original_max_position_embeddings=64
        )
        part = RopeParams(
            theta=100.0,
            rope_type=kind,
            factor=4.0,
            original_max_position_embeddings=64,
            partial_rotary_factor=0.25,
        )
        assert torch.equal(frequencies(part, 64, "cpu")[0], frequencies(whole, 16, "cpu")[0])
