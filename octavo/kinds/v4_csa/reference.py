"""What compressed sparse attention computes, slowly."""

from __future__ import annotations

from torch import Tensor

from octavo.kinds.v4_csa.layer import V4CompressedSparseLayer
from octavo.nn.compressed_reference import choices, compress, dense


def sparse(layer: V4CompressedSparseLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]: every token reads the entries that its index scores choose."""
    entries, chosen = (
        compress(layer.compressor, hidden),
        choices(layer, layer.compressor.indexer, hidden),
    )
    return dense(layer, hidden, lambda position: [entries[number] for number in chosen[position]])
