"""What a gated short convolution remembers: its last inputs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.state import read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class ShortConv(Kind):
    """A causal convolution between two gates (LFM2)."""

    name: ClassVar[str] = "short_conv"
    layer: ClassVar[str] = "octavo.kinds.short_conv.layer:ShortConvLayer"
    reference: ClassVar[str] = "octavo.kinds.short_conv.reference:dense_short_conv"

    hidden_size: int
    kernel: int
    bias: bool = False

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters from ``hidden_size``, ``conv_L_cache`` and ``conv_bias``. Raises ConfigError
        naming the field.
        """
        return cls(
            hidden_size=count(config, "hidden_size"),
            kernel=read_kernel(config, "conv_L_cache"),
            bias=bool(config.get("conv_bias", False)),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv [hidden, kernel - 1]."""
        return (state_stream(dtypes, conv={"conv": (self.hidden_size,)}, kernel=self.kernel),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """The usual kernel, and the shortest, biased."""
        return (cls(hidden_size=24, kernel=3), cls(hidden_size=20, kernel=2, bias=True))
