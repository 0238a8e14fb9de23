"""What a chunked local attention layer remembers: keys and values of the open chunk. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.attention import AttentionParams, kv_stream, read_attention
from octavo.spec.kind import Config, Kind, count
from octavo.spec.law import Chunk
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class ChunkedLocal(Kind):
    """Causal softmax attention within aligned chunks of ``chunk`` tokens (Llama 4)."""

    name: ClassVar[str] = "chunked_local"
    layer: ClassVar[str] = "octavo.kinds.chunked_local.layer:ChunkedLocalLayer"
    reference: ClassVar[str] = "octavo.nn.attention:dense_attention"

    attention: AttentionParams
    chunk: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of a ``chunked_attention`` layer. Raises ConfigError without a positive
        ``attention_chunk_size``.
        """
        return cls(
            attention=read_attention(config, "chunked_attention"),
            chunk=count(config, "attention_chunk_size"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``kv`` of fields k and v, all let go when the next chunk begins."""
        return (kv_stream(self.attention, Chunk(self.chunk), dtypes),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Chunks of one token, of no whole number of blocks, and of several blocks."""
        plain = AttentionParams(
            hidden_size=48,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            scale=0.25,
            rope=RopeParams(theta=10000.0),
        )
        return tuple(cls(attention=plain, chunk=chunk) for chunk in (1, 6, 16))
