"""What a compressed sparse attention layer remembers: a window, groups and their index keys, open
groups. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.latent import (
    CompressedParams,
    compressor_stream,
    entry_stream,
    index_stream,
    read_compressed,
)
from octavo.spec.law import Everything, Tail, Window
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class V4CompressedSparse(Kind):
    """Softmax attention over the last ``window`` entries and ``index_topk`` compressed ones
    (DeepSeek-V4, CSA).

    ratio: tokens per compressed entry. Each entry also sees the group before its own, so a
    compressor looks back one group further than it is open. The indexer has a compressor of its
    own.
    """

    name: ClassVar[str] = "v4_csa"
    layer: ClassVar[str] = "octavo.kinds.v4_csa.layer:V4CompressedSparseLayer"
    reference: ClassVar[str] = "octavo.kinds.v4_csa.reference:sparse"

    attention: CompressedParams
    ratio: int
    index_heads: int
    index_dim: int
    index_topk: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by DeepSeek-V4's key names, the ratio from ``compress_ratios[index]``. Raises
        ConfigError.
        """
        return cls(
            attention=read_compressed(config, "compress", window=count(config, "sliding_window")),
            ratio=config["compress_ratios"][index],
            index_heads=count(config, "index_n_heads"),
            index_dim=count(config, "index_head_dim"),
            index_topk=count(config, "index_topk"),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """Streams ``window``, ``compressed`` and ``index`` (both kept for ever, an entry per
        group), and both compressors.

        A compressor needs its open group and the half of its projections of the group before that
        the next entry will use; both halves are kept, as a group is still open when its are
        written.
        """
        sizes, law = self.attention, Tail(self.ratio, self.ratio)
        return (
            entry_stream("window", sizes, Window(sizes.window), dtypes),
            entry_stream("compressed", sizes, Everything(), dtypes, stride=self.ratio),
            index_stream(self.index_dim, dtypes, stride=self.ratio),
            compressor_stream("compressor", sizes.head_dim, law, dtypes),
            compressor_stream("index_compressor", self.index_dim, law, dtypes),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """The real ratio, and one that divides no block of a power of two."""
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
        return tuple(
            cls(attention=sizes, ratio=ratio, index_heads=16, index_dim=8, index_topk=5)
            for ratio in (4, 3)
        )
