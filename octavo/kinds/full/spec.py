"""What a full-attention layer remembers: keys and values of everything. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.attention import AttentionParams, kv_stream, read_attention
from octavo.spec.kind import Config, Kind
from octavo.spec.law import Everything
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class FullAttention(Kind):
    """Causal softmax attention over the whole past."""

    name: ClassVar[str] = "full"
    layer: ClassVar[str] = "octavo.kinds.full.layer:FullAttentionLayer"
    reference: ClassVar[str] = "octavo.nn.attention:dense_attention"

    attention: AttentionParams

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of a ``full_attention`` layer; see ``octavo.spec.attention.read_attention``
        for the keys.
        """
        return cls(attention=read_attention(config, "full_attention"))

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``kv`` of fields k and v, kept for ever."""
        return (kv_stream(self.attention, Everything(), dtypes),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Grouped heads; one K/V head with query/key norm, bias and scaled rotary frequencies; as
        many K/V heads as queries, and gates.
        """
        plain = RopeParams(theta=10000.0)
        scaled = RopeParams(
            theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=64
        )
        return (
            cls(
                attention=AttentionParams(
                    hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=plain
                )
            ),
            cls(
                attention=AttentionParams(
                    hidden_size=48,
                    num_heads=3,
                    num_kv_heads=1,
                    head_dim=8,
                    scale=0.3,
                    rope=scaled,
                    qk_norm="scale",
                    bias=True,
                    out_bias=True,
                )
            ),
            cls(
                attention=AttentionParams(
                    hidden_size=32,
                    num_heads=2,
                    num_kv_heads=2,
                    head_dim=10,
                    scale=0.3,
                    rope=plain,
                    qk_norm="offset",
                    softcap=5.0,
                    gated=True,
                )
            ),
        )
