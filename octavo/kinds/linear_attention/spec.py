"""What a plain linear attention layer remembers: sums of outer products and of keys, per head.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.law import Snapshot
from octavo.spec.stream import CacheDtypes, Field, Stream


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Kind):
    """Attention by the feature map elu(x) + 1 in place of a softmax (Katharopoulos et al. 2020)."""

    name: ClassVar[str] = "linear_attention"
    layer: ClassVar[str] = "octavo.kinds.linear_attention.layer:LinearAttentionLayer"
    reference: ClassVar[str] = "octavo.kinds.linear_attention.reference:quadratic_attention"

    hidden_size: int
    num_heads: int
    head_dim: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters from ``hidden_size``, ``num_attention_heads`` and ``head_dim``. Raises
        ConfigError naming the field.
        """
        return cls(
            hidden_size=count(config, "hidden_size"),
            num_heads=count(config, "num_attention_heads"),
            head_dim=count(config, "head_dim"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: recurrent [heads, dim, dim], and the keys' sum [heads, dim] that
        normalises.
        """
        shape = (self.num_heads, self.head_dim, self.head_dim)
        fields = (
            Field(name="recurrent", shape=shape, dtype=dtypes.state, shard="heads"),
            Field(name="normaliser", shape=shape[:2], dtype=dtypes.state, shard="heads"),
        )
        return (Stream(name="state", law=Snapshot(), fields=fields),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Several heads, and one."""
        return (
            cls(hidden_size=24, num_heads=3, head_dim=8),
            cls(hidden_size=20, num_heads=1, head_dim=10),
        )
