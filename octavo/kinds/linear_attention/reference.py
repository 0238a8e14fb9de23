"""Plain linear attention in its quadratic form: every query against every earlier key. Owns the
oracle only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.linear_attention.layer import LinearAttentionLayer

EPS = 1e-6


def quadratic_attention(layer: LinearAttentionLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]."""
    q, k, v = layer.heads(hidden)
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    scores = torch.einsum("ihd,jhd->hij", q, k).tril()
    scores = scores / (scores.sum(-1, keepdim=True) + EPS)
    return layer.o_proj(torch.einsum("hij,jhd->ihd", scores, v).flatten(1))
