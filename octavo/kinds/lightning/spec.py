"""What a lightning attention layer remembers: one matrix per head. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.state import state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class Lightning(Kind):
    """Linear attention with a decay per head that layer and head decide (Qin et al. 2024;
    MiniMax-01).
    """

    name: ClassVar[str] = "lightning"
    layer: ClassVar[str] = "octavo.kinds.lightning.layer:LightningLayer"
    reference: ClassVar[str] = "octavo.kinds.lightning.reference:dense_lightning"

    hidden_size: int
    num_heads: int
    head_dim: int
    index: int
    num_layers: int
    activation: str = "silu"
    norm_eps: float = 1e-6

    @property
    def slopes(self) -> tuple[float, ...]:
        """What a token takes off the logarithm of each head's state; less in later layers (Qin et
        al. 2024, section 3.2).
        """
        factor = 1 - self.index / (self.num_layers - 1 + 1e-5) + 1e-5
        return tuple(
            2 ** (-8 * head / self.num_heads) * factor for head in range(1, self.num_heads + 1)
        )

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of layer ``index``; its decay depends on where it stands. Raises ConfigError
        naming the field.
        """
        return cls(
            hidden_size=count(config, "hidden_size"),
            num_heads=count(config, "num_attention_heads"),
            head_dim=count(config, "head_dim"),
            index=index,
            num_layers=count(config, "num_hidden_layers"),
            **({} if config.get(PLANNING) else {"activation": config["hidden_act"]}),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: recurrent [heads, dim, dim]."""
        return (
            state_stream(dtypes, conv={}, recurrent=(self.num_heads, self.head_dim, self.head_dim)),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """The first and a later layer, whose decays differ."""
        return tuple(
            cls(hidden_size=24, num_heads=3, head_dim=8, index=index, num_layers=4)
            for index in (0, 2)
        )
