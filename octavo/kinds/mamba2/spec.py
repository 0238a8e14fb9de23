"""What a Mamba-2 layer remembers: a state per head, and the last inputs of its convolution. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.state import check_multiple, read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class Mamba2(Kind):
    """A state space with a scalar decay per head (Dao and Gu 2024); ``num_groups`` groups of heads share B and C."""

    name: ClassVar[str] = "mamba2"

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int

    def __post_init__(self) -> None:
        check_multiple(self.num_heads, self.num_groups, ("mamba_n_heads", "mamba_n_groups"))

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by Bamba's key names, ``mamba_*``. Raises ConfigError naming the field."""
        return cls(
            hidden_size=count(config, "hidden_size"),
            num_heads=count(config, "mamba_n_heads"),
            head_dim=count(config, "mamba_d_head"),
            num_groups=count(config, "mamba_n_groups"),
            state_size=count(config, "mamba_d_state"),
            kernel=read_kernel(config, "mamba_d_conv"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv over x [heads, dim], B and C [groups, state]; recurrent [heads, dim, state]."""
        shared = (self.num_groups, self.state_size)
        conv = {"conv_x": (self.num_heads, self.head_dim), "conv_b": shared, "conv_c": shared}
        shape = (self.num_heads, self.head_dim, self.state_size)
        return (state_stream(dtypes, conv=conv, kernel=self.kernel, recurrent=shape),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """One group, and several."""
        return (
            cls(hidden_size=24, num_heads=4, head_dim=12, num_groups=1, state_size=8, kernel=4),
            cls(hidden_size=24, num_heads=4, head_dim=6, num_groups=2, state_size=10, kernel=3),
        )
