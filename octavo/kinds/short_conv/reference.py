"""The gated short convolution, slowly: the whole sequence, one token at a time. Owns the oracle
only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.short_conv.layer import ShortConvLayer


def dense_short_conv(layer: ShortConvLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]."""
    taps, bias = layer.conv.weight[:, 0], layer.conv.bias
    before, after, u = layer.in_proj(hidden).chunk(3, dim=-1)
    inputs, outs = before * u, []
    for token in range(hidden.shape[0]):
        made = torch.zeros_like(hidden[0]) if bias is None else bias.clone()
        for back in range(min(token + 1, taps.shape[1])):
            made = made + taps[:, -1 - back] * inputs[token - back]
        outs.append(after[token] * made)
    return layer.out_proj(torch.stack(outs))
