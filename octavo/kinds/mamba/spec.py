"""What a Mamba layer remembers: a state per channel, and the last inputs of its convolution.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.state import read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class Mamba(Kind):
    """A selective state space (Gu and Dao 2023) over ``inner_size`` channels with ``state_size``
    numbers each.

    rank: of the time steps before they are projected to channels. bias: of input and output
    projections. norm: RMSNorm of time steps, B and C, with weights (``scale``, Jamba) or without
    (``unit``, Falcon Mamba), or None.
    """

    name: ClassVar[str] = "mamba"
    layer: ClassVar[str] = "octavo.kinds.mamba.layer:MambaLayer"
    reference: ClassVar[str] = "octavo.kinds.mamba.reference:dense"

    hidden_size: int
    inner_size: int
    state_size: int
    kernel: int
    rank: int
    bias: bool = False
    conv_bias: bool = True
    norm: Literal["scale", "unit"] | None = None
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by Mamba's key names.

        Besides upstream's, the family sets ``mixer_norm`` and, with it, ``mixer_rms_eps``, and
        ``time_step_rank`` to a number. Raises ConfigError naming the field.
        """
        sizes = cls(
            hidden_size=count(config, "hidden_size"),
            inner_size=count(config, "intermediate_size"),
            state_size=count(config, "state_size"),
            kernel=read_kernel(config, "conv_kernel"),
            rank=count(config, "time_step_rank"),
        )
        if config.get(PLANNING):
            return sizes
        return replace(
            sizes,
            bias=bool(config["use_bias"]),
            conv_bias=bool(config["use_conv_bias"]),
            norm=config.get("mixer_norm"),
            norm_eps=float(config.get("mixer_rms_eps", 1e-6)),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv [inner, kernel - 1], recurrent [inner, state]."""
        shape = (self.inner_size, self.state_size)
        return (
            state_stream(
                dtypes, conv={"conv": (self.inner_size,)}, kernel=self.kernel, recurrent=shape
            ),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """The usual kernel; the shortest, with biases and weightless norms; norms with weights."""
        return (
            cls(hidden_size=24, inner_size=48, state_size=8, kernel=4, rank=3),
            cls(
                hidden_size=24,
                inner_size=24,
                state_size=5,
                kernel=2,
                rank=2,
                bias=True,
                conv_bias=False,
                norm="unit",
            ),
            cls(
                hidden_size=16,
                inner_size=32,
                state_size=4,
                kernel=3,
                rank=4,
                norm="scale",
                norm_eps=1e-5,
            ),
        )
