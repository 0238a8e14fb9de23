"""The short causal convolution of recurrent layers, with the checkpoint's names and shapes.

Owns ``CausalConv``. What is convolved and what is remembered of it are the kinds'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.nn.module import Module
from octavo.ops.paged import CacheView
from octavo.ops.states import states


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

    def forward(self, x: Tensor, view: CacheView, *names: str) -> Tensor:
        """x [E, channels] -> [E, channels]; past inputs are in fields ``names`` of the view."""
        return self.ops.conv(x, self.taps, self.bias, states(view, *names))
