"""Keys and values of echo attention in eight bits: what the codec of its fields does.

Owns the arithmetic of ``spec.Levels``. Works on one head of one entry at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.ops.codec import Coder
from octavo.spec.stream import Field, Stream
from tests.plugins.echo.spec import Levels

ZERO = 128
"""The byte that stands for 0."""


class LevelsCoder(Coder):
    """Bytes ``ZERO - 127`` to ``ZERO + 127`` are as many steps of the entry's own size."""

    def __init__(self, codec: Levels, field: Field, stream: Stream) -> None:
        super().__init__(codec, field, stream)
        self.step = codec.step

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """[..., size] -> bytes [..., size] and the size of a step, float32 [..., 1]."""
        largest = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        # A power of two is found again from what was decoded: encoding that changes nothing.
        step = torch.exp2(torch.ceil(torch.log2(largest / 127)))
        steps = torch.round(values.float() / step)
        return {self.field.name: (steps + ZERO).to(torch.uint8), self.step: step}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The inverse, float32 [..., size]."""
        return (stored[self.field.name].float() - ZERO) * stored[self.step]
