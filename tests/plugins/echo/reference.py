"""What echo attention is, slowly: one query and head at a time, no cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.step import Step
from tests.plugins.echo.layer import EchoLayer


def echo_attention(layer: EchoLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d] in hidden's dtype, which must be the layer's; exact where both are
    float64.
    """
    kind, params, count = layer.kind, layer.params, hidden.shape[0]
    step = Step.alone(count, hidden.device)
    q, (k, v) = layer.queries(hidden, step), layer.keys_values(hidden, step)
    mixed = torch.zeros_like(q)
    for query in range(count):
        heard = [p for p in range(query + 1) if p < kind.sinks or p > query - kind.window]
        for head in range(params.num_heads):
            group = head // (params.num_heads // params.num_kv_heads)
            scores = k[heard, group] @ q[query, head] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            mixed[query, head] = torch.softmax(scores, dim=0) @ v[heard, group]
    return layer.o_proj(mixed.flatten(1))
