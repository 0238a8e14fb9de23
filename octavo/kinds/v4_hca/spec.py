"""What a heavily compressed attention layer remembers: a window, an entry per group, and the open
group. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.latent import CompressedParams, compressor_stream, entry_stream, read_compressed
from octavo.spec.law import Everything, Tail, Window
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class V4HeavilyCompressed(Kind):
    """Softmax attention over the last ``window`` entries and every compressed entry (DeepSeek-V4,
    HCA).

    ratio: tokens per compressed entry; groups do not overlap. An entry can be seen from the token
        on that closes its group.
    """

    name: ClassVar[str] = "v4_hca"
    layer: ClassVar[str] = "octavo.kinds.v4_hca.layer:V4HeavilyCompressedLayer"
    reference: ClassVar[str] = "octavo.kinds.v4_hca.reference:heavy"

    attention: CompressedParams
    ratio: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by DeepSeek-V4's key names, the ratio from ``compress_ratios[index]``. Raises
        ConfigError.
        """
        return cls(
            attention=read_compressed(config, "compress", window=count(config, "sliding_window")),
            ratio=config["compress_ratios"][index],
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """Streams ``window``, ``compressed`` (kept for ever, one entry per group) and
        ``compressor`` (the open group).
        """
        sizes = self.attention
        return (
            entry_stream("window", sizes, Window(sizes.window), dtypes),
            entry_stream("compressed", sizes, Everything(), dtypes, stride=self.ratio),
            compressor_stream("compressor", sizes.head_dim, Tail(self.ratio), dtypes),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Groups as long as the window, and shorter ones."""
        rope = RopeParams(
            theta=160000.0,
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            attention_factor=1.0,
            interleaved=True,
        )
        sizes = CompressedParams(
            hidden_size=48,
            num_heads=4,
            head_dim=16,
            rope_dim=4,
            window=16,
            q_lora_rank=20,
            o_groups=2,
            o_lora_rank=12,
            rope=rope,
        )
        return (cls(attention=sizes, ratio=16), cls(attention=sizes, ratio=5))
