"""Lightning attention, slowly: the whole sequence, one token at a time. Owns the oracle only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.kinds.lightning.layer import LightningLayer


def dense_lightning(layer: LightningLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]."""
    q, k, v = layer.heads(hidden)
    mixed = torch.zeros_like(v)
    for head, slope in enumerate(layer.kind.slopes):
        state = torch.zeros_like(q[0, head].outer(v[0, head]))
        for token in range(hidden.shape[0]):
            state = math.exp(-slope) * state + k[token, head].outer(v[token, head])
            mixed[token, head] = state.T @ q[token, head]
    return layer.output(mixed, hidden)
