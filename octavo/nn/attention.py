"""The torch layer of every kind that keeps separate keys and values per head.

Owns projections, per-head norms and rotation, with the checkpoint's module names. What is remembered, and how far a query
sees, is the kind's: it passes a window or none. ``project`` is shared with the kinds' slow references.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.nn.norm import RMSNorm
from octavo.nn.rope import rotate, tables
from octavo.nn.step import Caches, Step
from octavo.ops.attention import attend
from octavo.spec.attention import AttentionParams


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Keys are cached after norm and rotation. Stream ``kv``, fields k and v."""

    def __init__(self, params: AttentionParams, *, window: int | None, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.params, self.window, self.hidden_size = params, window, params.hidden_size

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        queries, keys = params.num_heads * params.head_dim, params.num_kv_heads * params.head_dim
        self.q_proj = linear(params.hidden_size, queries, params.bias)
        self.k_proj = linear(params.hidden_size, keys, params.bias)
        self.v_proj = linear(params.hidden_size, keys, params.bias)
        self.o_proj = linear(queries, params.hidden_size, params.out_bias)
        if params.qk_norm is not None:
            self.q_norm = RMSNorm(params.head_dim, params.norm_eps, params.qk_norm, dtype=dtype, device=device)
            self.k_norm = RMSNorm(params.head_dim, params.norm_eps, params.qk_norm, dtype=dtype, device=device)

    def project(self, hidden: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, d] -> q [T, Hq, D], k, v [T, Hkv, D], normed and rotated."""
        params = self.params
        q = self.q_proj(hidden).view(-1, params.num_heads, params.head_dim)
        k = self.k_proj(hidden).view(-1, params.num_kv_heads, params.head_dim)
        v = self.v_proj(hidden).view(-1, params.num_kv_heads, params.head_dim)
        if params.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope = params.rope
        assert rope is not None, "a spec for planning has no layers"
        key = (rope, params.head_dim, hidden.dtype)
        cos, sin = step.shared(key, lambda: tables(rope, params.head_dim, step.positions, hidden.dtype))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's keys and values as the cache's batch says."""
        q, k, v = self.project(hidden, step)
        mixed = attend(q, k, v, caches["kv"], scale=self.params.scale, window=self.window, softcap=self.params.softcap)
        return self.o_proj(mixed.flatten(1))


def dense_attention(layer: Attention, hidden: Tensor, window: int | None) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], one query and head at a time, without a cache: the kinds' oracle."""
    params = layer.params
    count = hidden.shape[0]
    positions = torch.arange(count, device=hidden.device)
    q, k, v = layer.project(hidden, Step(positions=positions, last=positions[:0]))
    mixed = torch.zeros(count, params.num_heads, params.head_dim, dtype=hidden.dtype, device=hidden.device)
    for query in range(count):
        first = 0 if window is None else max(0, query - window + 1)
        for head in range(params.num_heads):
            group = head // (params.num_heads // params.num_kv_heads)
            scores = k[first : query + 1, group] @ q[query, head] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            mixed[query, head] = torch.softmax(scores, dim=0) @ v[first : query + 1, group]
    return layer.o_proj(mixed.flatten(1))
