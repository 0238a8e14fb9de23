"""The torch layer of DeepSeek-V4's layers without a compressor: ``nn.compressed`` with its window
alone.
"""

from __future__ import annotations

import torch

from octavo.kinds.v4_window.spec import V4Window
from octavo.nn.compressed import CompressedAttention


class V4WindowLayer(CompressedAttention):
    """Causal attention over a window and a sink."""

    def __init__(self, kind: V4Window, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(kind.attention, dtype, device)
