"""What a gated linear recurrence remembers: one number per channel, and the last inputs of its
convolution. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.state import check_multiple, read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class RealGatedRecurrent(Kind):
    """A gated linear recurrence behind a short convolution (Griffin, De et al. 2024).

    num_heads: diagonal blocks of its gates. activation: of the branch beside it.
    """

    name: ClassVar[str] = "rg_lru"
    layer: ClassVar[str] = "octavo.kinds.rg_lru.layer:RealGatedRecurrentLayer"
    reference: ClassVar[str] = "octavo.kinds.rg_lru.reference:dense_recurrence"

    hidden_size: int
    width: int
    kernel: int
    num_heads: int
    activation: str = "gelu_pytorch_tanh"

    def __post_init__(self) -> None:
        check_multiple(self.width, self.num_heads, ("lru_width", "num_attention_heads"))

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters from ``lru_width``, ``conv1d_width`` and ``num_attention_heads``. Raises
        ConfigError naming the field.
        """
        return cls(
            hidden_size=count(config, "hidden_size"),
            width=count(config, "lru_width"),
            kernel=read_kernel(config, "conv1d_width"),
            num_heads=count(config, "num_attention_heads"),
            **({} if config.get(PLANNING) else {"activation": config["hidden_activation"]}),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv [width, kernel - 1], recurrent [width]."""
        return (
            state_stream(
                dtypes, conv={"conv": (self.width,)}, kernel=self.kernel, recurrent=(self.width,)
            ),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """As wide as the model, and wider."""
        return (
            cls(hidden_size=24, width=24, kernel=4, num_heads=3),
            cls(hidden_size=16, width=20, kernel=2, num_heads=1),
        )
