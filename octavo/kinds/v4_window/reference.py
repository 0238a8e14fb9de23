"""What a window layer of DeepSeek-V4 computes, slowly."""

from __future__ import annotations

from torch import Tensor

from octavo.kinds.v4_window.layer import V4WindowLayer
from octavo.nn.compressed_reference import dense


def windowed(layer: V4WindowLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]."""
    return dense(layer, hidden)
