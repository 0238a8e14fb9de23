"""The torch layer of every kind that keeps separate keys and values per head.

Owns projections, per-head norms and rotation, with the checkpoint's module names. What is remembered, and how far a query
sees, is the kind's: it passes its law. ``queries`` and ``keys_values`` are
shared with the kinds' slow references.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.kernels.pointwise import normed_rotated, takes
from octavo.nn.linear import Linear
from octavo.nn.norm import Norm, unit
from octavo.nn.rope import rotate, tables
from octavo.nn.step import Caches, Step
from octavo.ops.attention import attend
from octavo.spec.attention import AttentionParams
from octavo.spec.law import Law
from octavo.spec.rope import RopeParams


class Attention(nn.Module):
    """Grouped-query attention. Keys are cached after norm and rotation. Stream ``kv``, fields k and v."""

    def __init__(self, params: AttentionParams, *, law: Law, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.params, self.law, self.hidden_size = params, law, params.hidden_size

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        queries, keys = params.num_heads * params.head_dim, params.num_kv_heads * params.head_dim
        self.q_proj = linear(params.hidden_size, 2 * queries if params.gated else queries, params.bias)
        self.o_proj = linear(queries, params.hidden_size, params.out_bias)
        if params.makes_kv:
            self.k_proj = linear(params.hidden_size, keys, params.bias)
            if not params.k_eq_v:
                self.v_proj = linear(params.hidden_size, keys, params.bias)
        if params.qk_norm is not None:
            whole, style = params.qk_norm_over == "projection", params.qk_norm
            self.q_norm = Norm(queries if whole else params.head_dim, params.norm_eps, style, dtype=dtype, device=device)
            if params.makes_kv:
                self.k_norm = Norm(keys if whole else params.head_dim, params.norm_eps, style, dtype=dtype, device=device)
        if params.sinks:
            self.sinks = nn.Parameter(torch.zeros(params.num_heads, dtype=dtype, device=device), requires_grad=False)

    def queries(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, d] -> q [T, Hq, D], normed and rotated."""
        return self._queries(self._project(hidden)[0], step)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden [T, d] -> queries and gates [T, Hq * D], the latter where there are any."""
        made = self.q_proj(hidden)
        if not self.params.gated:
            return made, None
        q, gate = made.view(-1, self.params.num_heads, 2 * self.params.head_dim).chunk(2, dim=-1)
        return q.flatten(1), gate.flatten(1)

    def _queries(self, q: Tensor, step: Step) -> Tensor:
        params = self.params
        q = self._ready("q_norm", q, params.num_heads, step)
        if params.temperature is None:
            return q
        floor, strength = params.temperature
        factor = step.shared(("temperature", floor, strength), lambda: _temperature(step.positions, floor, strength))
        return (q * factor).to(q.dtype)

    def keys_values(self, hidden: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """hidden [T, d] -> k, v [T, Hkv, D]; keys normed and rotated."""
        params, k = self.params, self.k_proj(hidden)
        v = (k if params.k_eq_v else self.v_proj(hidden)).view(-1, params.num_kv_heads, params.head_dim)
        v = unit(v, params.norm_eps) if params.v_norm else v
        return self._ready("k_norm", k, params.num_kv_heads, step), v

    def _ready(self, name: str, projected: Tensor, heads: int, step: Step) -> Tensor:
        """[T, heads * D] -> [T, heads, D], normed and rotated, in one call where there is a kernel."""
        params, rope = self.params, self.params.rope
        if params.qk_norm is None or params.qk_norm_over == "projection" or rope is None or params.qk_unit_norm:
            return self._turn(self._norm(name, projected, heads), step)
        norm, (cos, sin) = getattr(self, name), self._tables(rope, projected.dtype, step)
        if not takes(projected) or norm.weight.dtype != projected.dtype:
            return self._turn(self._norm(name, projected, heads), step)
        split = projected.view(-1, heads, params.head_dim)
        return normed_rotated(split, norm.weight, norm.eps, norm.style, cos, sin, interleaved=rope.interleaved)

    def _tables(self, rope: RopeParams, dtype: torch.dtype, step: Step) -> tuple[Tensor, Tensor]:
        dim = self.params.head_dim
        return step.shared((rope, dim, dtype), lambda: tables(rope, dim, step.positions, dtype))

    def _norm(self, name: str, projected: Tensor, heads: int) -> Tensor:
        """[T, heads * D] -> [T, heads, D], with the norm of that name where there is one."""
        split, params = (-1, heads, self.params.head_dim), self.params
        if params.qk_norm is None:
            return projected.view(split)
        norm = getattr(self, name)
        return norm(projected).view(split) if params.qk_norm_over == "projection" else norm(projected.view(split))

    def _turn(self, x: Tensor, step: Step) -> Tensor:
        """Rotate [T, heads, D] by the step's positions, unless the layer does not, and divide by the root mean square, if it
        does."""
        rope = self.params.rope
        if rope is not None:
            cos, sin = self._tables(rope, x.dtype, step)
            x = rotate(x, cos, sin, interleaved=rope.interleaved)
        return unit(x, self.params.norm_eps) if self.params.qk_unit_norm else x

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's keys and values as the cache's batch says."""
        params, (q, gate) = self.params, self._project(hidden)
        q = self._queries(q, step)
        k, v = self.keys_values(hidden, step) if params.makes_kv else (None, None)
        sinks = self.sinks if params.sinks else None
        mixed = attend(q, k, v, caches["kv"], law=self.law, scale=params.scale, softcap=params.softcap, sinks=sinks)
        return self.output(mixed, gate)

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """mixed [T, Hq, D] and its gates [T, Hq * D] -> [T, d]."""
        return self.o_proj(mixed.flatten(1) if gate is None else mixed.flatten(1) * gate.sigmoid())


def _temperature(positions: Tensor, floor: int, strength: float) -> Tensor:
    """Factors of queries, float32 [T, 1, 1], that grow with the position (Nakanishi 2025, as in Llama 4)."""
    return (torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * strength + 1.0)[:, None, None]


def dense_attention(layer: Attention, hidden: Tensor) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], one query and head at a time, without a cache: the kinds' oracle."""
    params = layer.params
    count = hidden.shape[0]
    step = Step.alone(count, hidden.device)
    q, (k, v) = layer.queries(hidden, step), layer.keys_values(hidden, step)
    mixed = torch.zeros(count, params.num_heads, params.head_dim, dtype=hidden.dtype, device=hidden.device)
    for query in range(count):
        seen = [key for start, stop in layer.law.needs(query) for key in range(start, stop)] + [query]
        for head in range(params.num_heads):
            group = head // (params.num_heads // params.num_kv_heads)
            scores = k[seen, group] @ q[query, head] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            if params.sinks:
                scores = torch.cat((scores, layer.sinks[head : head + 1]))
            mixed[query, head] = torch.softmax(scores, dim=0)[: len(seen)] @ v[seen, group]
    if not params.gated:
        return layer.o_proj(mixed.flatten(1))
    gate = layer.q_proj(hidden).view(count, params.num_heads, 2, params.head_dim)[:, :, 1]
    return layer.o_proj((mixed * torch.sigmoid(gate)).flatten(1))
