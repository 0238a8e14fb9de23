"""The torch layer of multi-head latent attention: ``nn.latent`` that attends to everything."""

from __future__ import annotations

import torch

from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.nn.latent import LatentAttention


class MultiHeadLatentLayer(LatentAttention):
    """Causal attention over all latents."""

    def __init__(
        self, kind: MultiHeadLatent, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(kind.latent, dtype=dtype, device=device)
