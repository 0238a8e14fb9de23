"""What a sliding-window layer remembers: keys and values of its window. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from octavo.spec.attention import AttentionParams, kv_stream, read_attention
from octavo.spec.kind import Config, Kind, count
from octavo.spec.law import Window
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Kind):
    """Causal softmax attention over the last ``window`` tokens, the query's own included
    (Transformers' ``sliding_window``).
    """

    name: ClassVar[str] = "sliding"
    layer: ClassVar[str] = "octavo.kinds.sliding.layer:SlidingWindowLayer"
    reference: ClassVar[str] = "octavo.nn.attention:dense_attention"

    attention: AttentionParams
    window: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of a ``sliding_attention`` layer. Raises ConfigError without a positive
        ``sliding_window``.
        """
        return cls(
            attention=read_attention(config, "sliding_attention"),
            window=count(config, "sliding_window"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``kv`` of fields k and v, kept as long as the window reaches."""
        return (kv_stream(self.attention, Window(self.window), dtypes),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Windows of one token, of less than a block, of no whole number of blocks, and of several
        blocks.
        """
        plain = AttentionParams(
            hidden_size=48,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            scale=0.25,
            rope=RopeParams(theta=10000.0),
        )
        normed = AttentionParams(
            hidden_size=32,
            num_heads=4,
            num_kv_heads=1,
            head_dim=8,
            scale=0.3,
            rope=RopeParams(theta=1000.0),
            qk_norm="offset",
        )
        return (
            cls(attention=plain, window=1),
            cls(attention=normed, window=3),
            cls(attention=plain, window=7),
            cls(attention=normed, window=16),
            cls(attention=replace(plain, rope=None, sinks=True), window=5),
        )
