"""The torch layer of every kind that keeps one latent per token: projections, norms, rotation, and
the slow oracle.

Owns ``LatentAttention``, with the checkpoint's module names, and ``dense_latent``. Which of the
tokens that a query sees it attends to is the kind's: it overrides ``choose``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.rope import tables
from octavo.nn.step import Caches, Step
from octavo.ops.latents import Heads, Queries
from octavo.ops.table import Ops
from octavo.spec.latent import LatentParams
from octavo.spec.rope import RopeParams


def turn(x: Tensor, rope: RopeParams | None, dim: int, step: Step, ops: Ops) -> Tensor:
    """Rotate the first ``dim`` elements of [T, heads, n] by the step's positions, as ``rope`` says;
    nothing if it is None.
    """
    if rope is None:
        return x
    cos, sin = step.shared((rope, dim, x.dtype), lambda: tables(rope, dim, step.positions, x.dtype))
    return ops.rotate(x, cos, sin, interleaved=rope.interleaved)


class LatentAttention(Module):
    """Multi-head latent attention. Latents are cached after their norm, shared keys after rotation.
    Stream ``latent``.
    """

    heads: Heads | None = None

    def __init__(
        self, params: LatentParams, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.params, self.hidden_size = params, params.hidden_size
        size, heads, rank = params.hidden_size, params.num_heads, params.kv_lora_rank

        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def norm(width: int) -> Norm:
            return Norm(width, params.norm_eps, "scale", dtype=dtype, device=device)

        queries = heads * (params.nope_dim + params.rope_dim)
        if params.q_lora_rank is None:
            self.q_proj = linear(size, queries)
        else:
            self.q_a_proj = linear(size, params.q_lora_rank, params.bias)
            self.q_a_layernorm = norm(params.q_lora_rank)
            self.q_b_proj = linear(params.q_lora_rank, queries)
        self.kv_a_proj_with_mqa = linear(size, rank + params.rope_dim, params.bias)
        self.kv_a_layernorm = norm(rank)
        self.kv_b_proj = linear(rank, heads * (params.nope_dim + params.value_dim))
        self.o_proj = linear(heads * params.value_dim, size, params.bias)

    def prepare(self) -> None:
        """Make what makes keys and values of latents."""
        self.heads = self._heads()

    def _heads(self) -> Heads:
        params = self.params
        up = self.kv_b_proj.weight.view(params.num_heads, -1, params.kv_lora_rank)
        return Heads.of(up, params.nope_dim, params.scale, self.ops)

    def source(self, hidden: Tensor) -> Tensor:
        """What queries are projected from: hidden [T, d], or its latent [T, q_lora_rank]."""
        if self.params.q_lora_rank is None:
            return hidden
        made: Tensor = self.q_a_layernorm(self.q_a_proj(hidden))
        return made

    def queries(self, source: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """-> plain [T, H, nope] and rotated [T, H, rope]."""
        params = self.params
        q = (self.q_proj if params.q_lora_rank is None else self.q_b_proj)(source)
        plain, rotated = q.view(source.shape[0], params.num_heads, -1).split(
            (params.nope_dim, params.rope_dim), dim=-1
        )
        return plain, turn(rotated, params.rope, params.rope_dim, step, self.ops)

    def entry(self, hidden: Tensor, step: Step) -> dict[str, Tensor]:
        """hidden [T, d] -> what is kept: latent [T, rank] and rope [T, rope]."""
        params = self.params
        latent, rope = self.kv_a_proj_with_mqa(hidden).split(
            (params.kv_lora_rank, params.rope_dim), dim=-1
        )
        return {
            "latent": self.kv_a_layernorm(latent),
            "rope": turn(rope[:, None], params.rope, params.rope_dim, step, self.ops)[:, 0],
        }

    def choose(self, hidden: Tensor, source: Tensor, step: Step, caches: Caches) -> Tensor | None:
        """The tokens that each of the step's attends to, int64 [T, k] as ``Queries.chosen``; None
        for all it sees.
        """
        return None

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's entries as the cache's batch says."""
        view, source = caches["latent"], self.source(hidden)
        view.keep(**self.entry(hidden, step))
        plain, rotated = self.queries(source, step)
        chosen = self.choose(hidden, source, step, caches)
        q = Queries(plain=plain, rotated=rotated, chosen=chosen)
        mixed = self.ops.attend_latent(q, view, self.heads or self._heads())
        return self.o_proj(mixed.flatten(1))


def dense_latent(
    layer: LatentAttention, hidden: Tensor, seen: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Whole sequence in [T, d], whole sequence out [T, d], one query and head at a time, without a
    cache: the kinds' oracle.

    seen: the tokens that each query attends to; all up to itself unless given.
    """
    params, count = layer.params, hidden.shape[0]
    step = Step.alone(count, hidden.device)
    plain, rotated = layer.queries(layer.source(hidden), step)
    entry = layer.entry(hidden, step)
    made = layer.kv_b_proj(entry["latent"]).view(
        count, params.num_heads, params.nope_dim + params.value_dim
    )
    keys, values = made.split((params.nope_dim, params.value_dim), dim=-1)
    mixed = hidden.new_zeros(count, params.num_heads, params.value_dim)
    for query in range(count):
        near = list(range(query + 1) if seen is None else seen[query])
        for head in range(params.num_heads):
            scores = (
                keys[near, head] @ plain[query, head] + entry["rope"][near] @ rotated[query, head]
            )
            mixed[query, head] = torch.softmax(scores * params.scale, dim=0) @ values[near, head]
    return layer.o_proj(mixed.flatten(1))
