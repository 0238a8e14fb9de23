"""The torch layer of chunked local attention: ``nn.attention`` within aligned chunks."""

from __future__ import annotations

import torch

from octavo.kinds.chunked_local.spec import ChunkedLocal
from octavo.nn.attention import Attention
from octavo.spec.law import Chunk


class ChunkedLocalLayer(Attention):
    """Causal attention over what the query's own chunk has so far."""

    def __init__(self, kind: ChunkedLocal, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(kind.attention, law=Chunk(kind.chunk), dtype=dtype, device=device)
