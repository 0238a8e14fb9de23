"""The torch layer of full attention: ``nn.attention`` that sees everything."""

from __future__ import annotations

import torch

from octavo.kinds.full.spec import FullAttention
from octavo.nn.attention import Attention
from octavo.spec.law import Everything


class FullAttentionLayer(Attention):
    """Causal attention over the whole past."""

    def __init__(self, kind: FullAttention, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(kind.attention, law=Everything(), dtype=dtype, device=device)
