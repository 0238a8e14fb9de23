"""What heavily compressed attention computes, slowly."""

from __future__ import annotations

from torch import Tensor

from octavo.kinds.v4_hca.layer import V4HeavilyCompressedLayer
from octavo.nn.compressed_reference import compress, dense


def heavy(layer: V4HeavilyCompressedLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]: every token reads all entries of groups that it or a token before it
    closes.
    """
    entries, ratio = compress(layer.compressor, hidden), layer.compressor.ratio
    return dense(layer, hidden, lambda position: entries[: (position + 1) // ratio])
