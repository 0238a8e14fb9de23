"""A Mamba-2 layer as a loop over tokens and heads: the kind's oracle. Shares projections with the
layer, and nothing of how states run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kinds.mamba2.layer import Mamba2Layer


def dense(layer: Mamba2Layer, hidden: Tensor) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], token by token and without a cache."""
    kind, weight = layer.kind, layer.conv1d.weight[:, 0]
    gate, inputs, dt = layer.projected(hidden)
    padded = F.pad(inputs, (0, 0, kind.kernel - 1, 0))
    state = hidden.new_zeros(kind.num_heads, kind.head_dim, kind.state_size)
    share, outs = kind.num_heads // kind.num_groups, []
    for token in range(hidden.shape[0]):
        made = (padded[token : token + kind.kernel] * weight.T).sum(0)
        made = F.silu(made if layer.conv1d.bias is None else made + layer.conv1d.bias)
        x, b, c = (part[0] for part in layer.parted(made[None]))
        y = torch.empty_like(x)
        for head in range(kind.num_heads):
            decay = torch.exp(-dt[token, head] * layer.A_log[head].exp())
            state[head] = decay * state[head] + torch.outer(
                dt[token, head] * x[head], b[head // share]
            )
            y[head] = state[head] @ c[head // share]
        outs.append(layer.finished(y[None], x[None], gate[token : token + 1]))
    return torch.cat(outs)
