"""A Mamba layer as a loop over tokens: the kind's oracle. Shares projections with the layer, and
nothing of how states run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kinds.mamba.layer import MambaLayer


def dense(layer: MambaLayer, hidden: Tensor) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], token by token and without a cache."""
    kind, weight = layer.kind, layer.conv1d.weight[:, 0]
    inputs, gate = layer.in_proj(hidden).chunk(2, dim=-1)
    padded = F.pad(inputs, (0, 0, kind.kernel - 1, 0))
    state = hidden.new_zeros(kind.inner_size, kind.state_size)
    outs = []
    for token in range(hidden.shape[0]):
        u = (padded[token : token + kind.kernel] * weight.T).sum(0)
        u = F.silu(u if layer.conv1d.bias is None else u + layer.conv1d.bias)
        dt, a, b, c = layer.selected(u[None])
        state = torch.exp(dt[0, :, None] * a) * state + torch.outer(dt[0] * u, b[0])
        outs.append(layer.finished((state @ c[0])[None], u[None], gate[token : token + 1]))
    return torch.cat(outs)
