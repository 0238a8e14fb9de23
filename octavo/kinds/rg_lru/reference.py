"""The gated linear recurrence, slowly: the whole sequence, one token at a time. Owns the oracle
only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.rg_lru.layer import SHARPNESS, RealGatedRecurrentLayer


def dense_recurrence(layer: RealGatedRecurrentLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]."""
    gates, taps, x = layer.rg_lru, layer.conv_1d.weight[:, 0], layer.linear_x(hidden)
    assert layer.conv_1d.bias is not None
    state, outs = torch.zeros_like(x[0]), []
    for token in range(hidden.shape[0]):
        u = layer.conv_1d.bias.clone()
        for back in range(min(token + 1, taps.shape[1])):
            u = u + taps[:, -1 - back] * x[token - back]
        entry = torch.sigmoid(
            u @ torch.block_diag(*gates.input_gate_weight) + gates.input_gate_bias.flatten()
        )
        keep = torch.sigmoid(
            u @ torch.block_diag(*gates.recurrent_gate_weight) + gates.recurrent_gate_bias.flatten()
        )
        decay = torch.exp(-SHARPNESS * keep * torch.log1p(gates.recurrent_param.exp()))
        state = entry * u if token == 0 else decay * state + torch.sqrt(1 - decay**2) * entry * u
        outs.append(state)
    return layer.linear_out(torch.stack(outs) * layer.activation(layer.linear_y(hidden)))
