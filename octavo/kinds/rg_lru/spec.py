"""What a gated linear recurrence remembers: one number per channel, and the last inputs of its convolution. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.state import read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class RealGatedRecurrent(Kind):
    """A gated linear recurrence behind a short convolution (Griffin, De et al. 2024)."""

    name: ClassVar[str] = "rg_lru"

    hidden_size: int
    width: int
    kernel: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters from ``lru_width`` and ``conv1d_width``. Raises ConfigError naming the field."""
        return cls(
            hidden_size=count(config, "hidden_size"),
            width=count(config, "lru_width"),
            kernel=read_kernel(config, "conv1d_width"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv [width, kernel - 1], recurrent [width]."""
        return (state_stream(dtypes, conv={"conv": (self.width,)}, kernel=self.kernel, recurrent=(self.width,)),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """As wide as the model, and wider."""
        return (cls(hidden_size=24, width=24, kernel=4), cls(hidden_size=16, width=20, kernel=2))
