"""What a Mamba layer remembers: a state per channel, and the last inputs of its convolution. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.state import read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class Mamba(Kind):
    """A selective state space (Gu and Dao 2023) over ``inner_size`` channels with ``state_size`` numbers each."""

    name: ClassVar[str] = "mamba"

    hidden_size: int
    inner_size: int
    state_size: int
    kernel: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters from ``hidden_size``, ``intermediate_size``, ``state_size`` and ``conv_kernel``. Raises ConfigError."""
        return cls(
            hidden_size=count(config, "hidden_size"),
            inner_size=count(config, "intermediate_size"),
            state_size=count(config, "state_size"),
            kernel=read_kernel(config, "conv_kernel"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv [inner, kernel - 1], recurrent [inner, state]."""
        shape = (self.inner_size, self.state_size)
        return (state_stream(dtypes, conv={"conv": (self.inner_size,)}, kernel=self.kernel, recurrent=shape),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """The usual kernel, and the shortest."""
        return (
            cls(hidden_size=24, inner_size=48, state_size=8, kernel=4),
            cls(hidden_size=24, inner_size=24, state_size=5, kernel=2),
        )
