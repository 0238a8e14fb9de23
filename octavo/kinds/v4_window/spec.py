"""What a DeepSeek-V4 layer without compressor remembers: the entries of its window. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.latent import CompressedParams, entry_stream, read_compressed
from octavo.spec.law import Window
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class V4Window(Kind):
    """Softmax attention with a sink over the last ``window`` entries, each key and value at
    once.
    """

    name: ClassVar[str] = "v4_window"
    layer: ClassVar[str] = "octavo.kinds.v4_window.layer:V4WindowLayer"
    reference: ClassVar[str] = "octavo.kinds.v4_window.reference:windowed"

    attention: CompressedParams

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by DeepSeek-V4's key names; see ``octavo.spec.latent.read_compressed``."""
        return cls(
            attention=read_compressed(config, "main", window=count(config, "sliding_window"))
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``window``."""
        return (entry_stream("window", self.attention, Window(self.attention.window), dtypes),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """A window of less than a block, and one of several."""
        sizes = CompressedParams(
            hidden_size=48,
            num_heads=4,
            head_dim=16,
            rope_dim=4,
            window=3,
            q_lora_rank=20,
            o_groups=2,
            o_lora_rank=12,
            rope=RopeParams(theta=10000.0, interleaved=True),
        )
        return cls(attention=sizes), cls(attention=replace(sizes, window=16))
