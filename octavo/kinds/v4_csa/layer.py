"""The torch layer of compressed sparse attention: a window, and the entries that an indexer
chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.v4_csa.spec import V4CompressedSparse
from octavo.nn.compressed import CompressedAttention, Compressor, Indexer
from octavo.nn.step import Caches, Step
from octavo.ops.paged import CacheView


class IndexedCompressor(Compressor):
    """A compressor with overlap, and the indexer that chooses among its entries."""

    def __init__(
        self, kind: V4CompressedSparse, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        sizes = kind.attention
        super().__init__(sizes, sizes.head_dim, kind.ratio, overlap=True, device=device)
        self.indexer = Indexer(
            sizes, kind.index_heads, kind.index_dim, kind.index_topk, kind.ratio, dtype, device
        )


class V4CompressedSparseLayer(CompressedAttention):
    """Causal attention over a window, ``kind.index_topk`` chosen entries of ``kind.ratio`` tokens,
    and a sink.
    """

    def __init__(
        self, kind: V4CompressedSparse, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(kind.attention, dtype, device)
        self.compressor = IndexedCompressor(kind, dtype, device)

    def compressed(
        self,
        hidden: Tensor,
        latent: Tensor,
        angles: tuple[Tensor, Tensor],
        step: Step,
        caches: Caches,
    ) -> tuple[CacheView | None, Tensor | None]:
        """The chosen entries. Streams ``compressed``, ``compressor``, and ``index``,
        ``index_compressor`` of the indexer.
        """
        indexer = self.compressor.indexer
        self.compressor(hidden, step, caches["compressor"], caches["compressed"])
        indexer(hidden, step, caches["index_compressor"], caches["index"])
        return caches["compressed"], indexer.chosen(hidden, latent, angles, caches["index"])
