"""The torch layer of sliding-window attention: ``nn.attention`` with a window."""

from __future__ import annotations

import torch

from octavo.kinds.sliding.spec import SlidingWindow
from octavo.nn.attention import Attention
from octavo.spec.law import Window


class SlidingWindowLayer(Attention):
    """Causal attention over the last ``kind.window`` tokens."""

    def __init__(self, kind: SlidingWindow, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(kind.attention, law=Window(kind.window), dtype=dtype, device=device)
