"""The torch layer of every kind that keeps separate keys and values per head.

Owns projections, per-head norms and rotation, with the checkpoint's module names. What is
remembered, and how far a query sees, is the kind's: it passes its law. ``queries`` and
``keys_values`` are shared with the kinds' slow references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from octavo.nn.linear import Linear, together
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.rope import tables
from octavo.nn.step import Caches, Step
from octavo.spec.attention import AttentionParams
from octavo.spec.law import Law
from octavo.spec.rope import RopeParams


class Attention(Module):
    """Grouped-query attention. Keys are cached after norm and rotation. Stream ``kv``, fields k and
    v.
    """

    product: Callable[[Tensor], Sequence[Tensor]] | None = None

    def __init__(
        self, params: AttentionParams, *, law: Law, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.params, self.law, self.hidden_size = params, law, params.hidden_size

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        queries, keys = params.num_heads * params.head_dim, params.num_kv_heads * params.head_dim
        self.q_proj = linear(
            params.hidden_size, 2 * queries if params.gated else queries, params.bias
        )
        self.o_proj = linear(queries, params.hidden_size, params.out_bias)
        self._inputs = ["q_proj"]
        if params.makes_kv:
            self.k_proj = linear(params.hidden_size, keys, params.bias)
            self._inputs.append("k_proj")
            if not params.k_eq_v:
                self.v_proj = linear(params.hidden_size, keys, params.bias)
                self._inputs.append("v_proj")
        if params.qk_norm is not None:
            whole, style = params.qk_norm_over == "projection", params.qk_norm
            self.q_norm = Norm(
                queries if whole else params.head_dim,
                params.norm_eps,
                style,
                dtype=dtype,
                device=device,
            )
            if params.makes_kv:
                self.k_norm = Norm(
                    keys if whole else params.head_dim,
                    params.norm_eps,
                    style,
                    dtype=dtype,
                    device=device,
                )
        if params.sinks:
            self.sinks = nn.Parameter(
                torch.zeros(params.num_heads, dtype=dtype, device=device), requires_grad=False
            )

    def prepare(self) -> None:
        """Make the product of all that is projected from the hidden state."""
        self.product = self._product()

    def _product(self) -> Callable[[Tensor], Sequence[Tensor]]:
        return together([getattr(self, name) for name in self._inputs], self.ops)

    def queries(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, d] -> q [T, Hq, D], normed and rotated."""
        return self._gated_queries(self.q_proj(hidden), step)[0]

    def keys_values(self, hidden: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """hidden [T, d] -> k, v [T, Hkv, D]; keys normed and rotated."""
        _, *pair = self._project(hidden)
        return self._keys_values(pair[0], pair[-1], step)

    def _project(self, hidden: Tensor) -> Sequence[Tensor]:
        """hidden [T, d] -> what ``q_proj``, ``k_proj`` and ``v_proj`` make, as far as there are
        any: queries, keys, values.
        """
        return (self.product or self._product())(hidden)

    def _gated_queries(self, made: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """What ``q_proj`` makes, [T, ...] -> q [T, Hq, D], normed and rotated, and gates [T, Hq *
        D], where there are any.
        """
        params = self.params
        if not params.gated:
            return self._queries(made, step), None
        q, gate = made.view(-1, params.num_heads, 2 * params.head_dim).chunk(2, dim=-1)
        return self._queries(q.flatten(1), step), gate.flatten(1)

    def _queries(self, q: Tensor, step: Step) -> Tensor:
        params = self.params
        q = self._finished("q_norm", q, params.num_heads, step)
        if params.temperature is None:
            return q
        floor, strength = params.temperature
        factor = step.shared(
            ("temperature", floor, strength), lambda: _temperature(step.positions, floor, strength)
        )
        return (q * factor).to(q.dtype)

    def _keys_values(self, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """What ``k_proj`` and ``v_proj`` make, [T, Hkv * D] -> k, v [T, Hkv, D]; keys normed and
        rotated.
        """
        params = self.params
        v = v.view(-1, params.num_kv_heads, params.head_dim)
        v = self.ops.norm(v, None, params.norm_eps, "unit") if params.v_norm else v
        return self._finished("k_norm", k, params.num_kv_heads, step), v

    def _finished(self, name: str, projected: Tensor, heads: int, step: Step) -> Tensor:
        """[T, heads * D] -> [T, heads, D], normed and rotated."""
        params, rope = self.params, self.params.rope
        if (
            params.qk_norm is None
            or params.qk_norm_over == "projection"
            or rope is None
            or params.qk_unit_norm
        ):
            return self._turn(self._norm(name, projected, heads), step)
        norm, (cos, sin) = getattr(self, name), self._tables(rope, projected.dtype, step)
        split = projected.view(-1, heads, params.head_dim)
        return self.ops.norm_rotate(
            split, norm.weight, norm.eps, norm.style, cos, sin, interleaved=rope.interleaved
        )

    def _tables(self, rope: RopeParams, dtype: torch.dtype, step: Step) -> tuple[Tensor, Tensor]:
        dim = self.params.head_dim
        return step.shared((rope, dim, dtype), lambda: tables(rope, dim, step.positions, dtype))

    def _norm(self, name: str, projected: Tensor, heads: int) -> Tensor:
        """[T, heads * D] -> [T, heads, D], with the norm of that name where there is one."""
        split, params = (-1, heads, self.params.head_dim), self.params
        if params.qk_norm is None:
            return projected.view(split)
        norm = getattr(self, name)
        return (
            norm(projected).view(split)
            if params.qk_norm_over == "projection"
            else norm(projected.view(split))
        )

    def _turn(self, x: Tensor, step: Step) -> Tensor:
        """Rotate [T, heads, D] by the step's positions, unless the layer does not, and divide by
        the root mean square, if it does.
        """
        rope = self.params.rope
        if rope is not None:
            cos, sin = self._tables(rope, x.dtype, step)
            x = self.ops.rotate(x, cos, sin, interleaved=rope.interleaved)
        return (
            self.ops.norm(x, None, self.params.norm_eps, "unit") if self.params.qk_unit_norm else x
        )

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's keys and values as the cache's batch says."""
        params, (made, *pair) = self.params, self._project(hidden)
        q, gate = self._gated_queries(made, step)
        k, v = self._keys_values(pair[0], pair[-1], step) if pair else (None, None)
        sinks, view = self.sinks if params.sinks else None, caches["kv"]
        if k is not None and v is not None:
            view.begin(k=k, v=v)
        mixed = self.ops.attend(q, view, scale=params.scale, softcap=params.softcap, sinks=sinks)
        view.end()
        return self.output(mixed, gate)

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """mixed [T, Hq, D] and its gates [T, Hq * D] -> [T, d]."""
        return self.o_proj(mixed.flatten(1) if gate is None else mixed.flatten(1) * gate.sigmoid())


def _temperature(positions: Tensor, floor: int, strength: float) -> Tensor:
    """Factors of queries, float32 [T, 1, 1], that grow with the position (Nakanishi 2025, as in
    Llama 4).
    """
    return (torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * strength + 1.0)[
        :, None, None
    ]


def dense_attention(layer: Attention, hidden: Tensor) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], one query and head at a time, without a
    cache: the kinds' oracle.
    """
    params = layer.params
    count = hidden.shape[0]
    step = Step.alone(count, hidden.device)
    made, *pair = layer._project(hidden)
    (q, gate), (k, v) = (
        layer._gated_queries(made, step),
        layer._keys_values(pair[0], pair[-1], step),
    )
    mixed = torch.zeros(
        count, params.num_heads, params.head_dim, dtype=hidden.dtype, device=hidden.device
    )
    for query in range(count):
        seen = [key for start, stop in layer.law.needs(query) for key in range(start, stop)] + [
            query
        ]
        for head in range(params.num_heads):
            group = head // (params.num_heads // params.num_kv_heads)
            scores = k[seen, group] @ q[query, head] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            if params.sinks:
                scores = torch.cat((scores, layer.sinks[head : head + 1]))
            mixed[query, head] = torch.softmax(scores, dim=0)[: len(seen)] @ v[seen, group]
    if gate is None:
        return layer.o_proj(mixed.flatten(1))
    return layer.o_proj(mixed.flatten(1) * torch.sigmoid(gate))
