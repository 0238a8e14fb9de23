"""A decoder whose residuals are the normed inputs, with a factor for what passes by and one for
what is added (MiniMax).

Owns ``WeightedDecoder``. Module names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from octavo.nn.decoder import Block, Decoder, LayerCaches, Trunk
from octavo.nn.step import Step
from octavo.spec.decoder import WeightedOptions
from octavo.spec.kind import LayerSpec


class WeightedBlock(Block):
    """One layer: ``x = norm(x); x = a x + b f(x)`` for the mixer and for the MLP."""

    def __init__(
        self,
        layer: LayerSpec,
        options: WeightedOptions,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(layer, options, dtype, device)
        self.mixer_factors, self.mlp_factors = (
            options.mixer_factors[layer.index],
            options.mlp_factors,
        )

    def forward(self, hidden: Tensor, step: Step, caches: LayerCaches) -> Tensor:
        """hidden [T, d] -> [T, d]."""
        passed, added = self.mixer_factors
        hidden = self._norm("input", hidden)
        hidden = hidden * passed + self._mix(hidden, step=step, caches=caches) * added
        passed, added = self.mlp_factors
        hidden = self._norm("post_attention", hidden)
        return hidden * passed + self.mlp(hidden) * added


class WeightedTrunk(Trunk):
    """Everything below the head."""

    block = WeightedBlock


class WeightedDecoder(Decoder):
    """``Decoder`` with such residuals."""

    reads: ClassVar[type[WeightedOptions]] = WeightedOptions
    trunk: ClassVar[type[WeightedTrunk]] = WeightedTrunk
