"""What a gated delta net layer remembers: a matrix per value head, and the last inputs of its convolution. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.state import check_multiple, read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Kind):
    """Linear attention by the gated delta rule (Yang et al. 2024); several value heads may share one key head."""

    name: ClassVar[str] = "gated_delta_net"

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self) -> None:
        check_multiple(self.value_heads, self.key_heads, ("linear_num_value_heads", "linear_num_key_heads"))

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by Qwen3-Next's key names, ``linear_*``. Raises ConfigError naming the field."""
        return cls(
            hidden_size=count(config, "hidden_size"),
            key_heads=count(config, "linear_num_key_heads"),
            value_heads=count(config, "linear_num_value_heads"),
            key_dim=count(config, "linear_key_head_dim"),
            value_dim=count(config, "linear_value_head_dim"),
            kernel=read_kernel(config, "linear_conv_kernel_dim"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: inputs of the convolution over q, k and v; recurrent [value heads, key dim, value dim]."""
        keys = (self.key_heads, self.key_dim)
        conv = {"conv_q": keys, "conv_k": keys, "conv_v": (self.value_heads, self.value_dim)}
        shape = (self.value_heads, self.key_dim, self.value_dim)
        return (state_stream(dtypes, conv=conv, kernel=self.kernel, recurrent=shape),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """As many value heads as key heads with other sizes, and twice as many."""
        return (
            cls(hidden_size=24, key_heads=2, value_heads=2, key_dim=6, value_dim=12, kernel=4),
            cls(hidden_size=24, key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=4),
        )
