"""The short causal convolution of recurrent layers, with the checkpoint's names and shapes.

Owns ``CausalConv``. What is convolved and what is remembered of it are the kinds'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from octavo.nn.module import Module
from octavo.ops.conv import causal_conv
from octavo.ops.ragged import Ragged


class CausalConv(Module):
    """A filter of ``width`` taps for each of ``channels``; parameters are those of ``nn.Conv1d``
    with as many groups.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(channels, 1, width, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.zeros(channels, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )

    @property
    def taps(self) -> Tensor:
        """[channels, width], the oldest input's first."""
        return self.weight[:, 0]

    def forward(self, x: Tensor, past: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
        """x [T, channels], past [R, channels, width - 1] -> outputs [T, channels], inputs to keep
        [E, channels, width - 1].
        """
        return causal_conv(x, past, self.taps, self.bias, ragged)


def joined(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Past inputs of one convolution that are kept in several fields [R, heads, size, width - 1]:
    [R, channels, width - 1].
    """
    return torch.cat([state[name].flatten(1, -2) for name in names], dim=1)
