"""The torch layer of heavily compressed attention: a window, and every entry that a compressor has
made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.v4_hca.spec import V4HeavilyCompressed
from octavo.nn.compressed import CompressedAttention, Compressor
from octavo.nn.step import Caches, Step
from octavo.ops.paged import CacheView


class V4HeavilyCompressedLayer(CompressedAttention):
    """Causal attention over a window, all entries of ``kind.ratio`` tokens, and a sink."""

    def __init__(
        self, kind: V4HeavilyCompressed, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(kind.attention, dtype, device)
        self.compressor = Compressor(
            kind.attention, kind.attention.head_dim, kind.ratio, overlap=False, device=device
        )

    def compressed(
        self,
        hidden: Tensor,
        latent: Tensor,
        angles: tuple[Tensor, Tensor],
        step: Step,
        caches: Caches,
    ) -> tuple[CacheView | None, Tensor | None]:
        """All entries, the step's own included. Streams ``compressed`` and ``compressor``."""
        self.compressor(hidden, step, caches["compressor"], caches["compressed"])
        return caches["compressed"], None
