"""The torch layers of DeepSeek-V4's attention: a window, and entries that a compressor makes of
several tokens each.

Owns ``CompressedAttention`` (low-rank queries, one entry that is key and value, grouped low-rank
output) and ``Compressor``; kinds add what they read beside the window. Module names are those of
Transformers' ``modeling_deepseek_v4``. Compressors compute in float32, as DeepSeek's own inference
code does. Fresh entries pass through the cache's dtype before they are read.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.norm import Norm
from octavo.nn.rope import tables
from octavo.nn.step import Caches, Step
from octavo.ops.paged import CacheView
from octavo.ops.reads import Closed
from octavo.ops.table import Ops, Product
from octavo.spec.latent import CompressedParams

Device = torch.device | str


def turn(x: Tensor, angles: tuple[Tensor, Tensor], ops: Ops, *, back: bool = False) -> Tensor:
    """Rotate the last elements of [n, heads, D] by tables [n, 1, rotated], in the tables' dtype;
    ``back``: the other way.
    """
    cos, sin = angles
    size = cos.shape[-1]
    front, turned = x[..., :-size], x[..., -size:].to(cos.dtype)
    turned = ops.rotate(turned, cos, -sin if back else sin, interleaved=True)
    return torch.cat((front, turned.to(x.dtype)), dim=-1)


def angles_at(
    params: CompressedParams, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [n, 1, rope_dim] in float32 at least."""
    assert params.rope is not None, "parameters for planning do not run"
    return tables(
        params.rope, params.rope_dim, positions, torch.promote_types(dtype, torch.float32)
    )


class Compressor(Module):
    """Makes one entry of every ``ratio`` tokens: a sum by softmax weights, one for each channel,
    normed and rotated.

    overlap: every token is projected twice, for the entry of its own group and for the next, which
    so pools two groups. What is remembered of single tokens is their value and their gate, the
    position's bias included.
    """

    def __init__(
        self, params: CompressedParams, dim: int, ratio: int, *, overlap: bool, device: Device
    ) -> None:
        super().__init__()
        self.params, self.dim, self.ratio, self.overlap = params, dim, ratio, overlap
        width, wide = dim * (2 if overlap else 1), torch.float32
        self.kv_proj = Linear(params.hidden_size, width, bias=False, dtype=wide, device=device)
        self.gate_proj = Linear(params.hidden_size, width, bias=False, dtype=wide, device=device)
        self.position_bias = nn.Parameter(
            torch.zeros(ratio, width, dtype=wide, device=device), requires_grad=False
        )
        self.kv_norm = Norm(dim, params.norm_eps, "wide", dtype=wide, device=device)

    def forward(self, hidden: Tensor, step: Step, tail: CacheView, entries: CacheView) -> None:
        """Store the entries that the step's tokens hidden [T, d] close, and what later ones need of
        its last tokens.
        """
        wide = hidden.to(self.kv_proj.weight.dtype)
        gate = self.gate_proj(wide) + self.position_bias[step.positions % self.ratio]
        rows, closed = tail.roll(kv=self.kv_proj(wide), gate=gate), entries.reads.closed(self.ratio)
        if closed.numbers.numel():
            made = self._pool(closed, step, tail, rows["kv"], rows["gate"])
            (part,) = entries.over.entry.parts
            entries.collect(**{part: made.to(hidden.dtype)})

    def _pool(
        self, closed: Closed, step: Step, tail: CacheView, kv: Tensor, gate: Tensor
    ) -> Tensor:
        """kv, gate [P + E, width] of single tokens -> the closed entries [C, dim]."""
        key, params = (id(tail.reads), self.ratio, self.overlap), self.params
        rows, missing = step.shared(("groups", *key), lambda: self._rows(closed, tail))
        if self.overlap:
            before, own = rows[:, : self.ratio], rows[:, self.ratio :]
            kv = torch.cat((kv[before, : self.dim], kv[own, self.dim :]), dim=1)
            gate = torch.cat((gate[before, : self.dim], gate[own, self.dim :]), dim=1)
        else:
            kv, gate = kv[rows], gate[rows]
        weights = torch.softmax(gate.masked_fill(missing[..., None], float("-inf")), dim=1)
        pooled = self.kv_norm((kv * weights).sum(dim=1))
        angles = step.shared(
            ("angles", params.rope, params.rope_dim, gate.dtype, *key),
            lambda: angles_at(params, closed.numbers * self.ratio, gate.dtype),
        )
        return turn(pooled[:, None], angles, self.ops)[:, 0]

    def _rows(self, closed: Closed, tail: CacheView) -> tuple[Tensor, Tensor]:
        """int64 [C, n], the rows of each entry's tokens, and bool [C, n], those of a group ahead of
        the first.
        """
        device = closed.numbers.device
        around = torch.arange(-self.ratio if self.overlap else 0, self.ratio, device=device)
        positions = closed.numbers[:, None] * self.ratio + around
        places = tail.reads.places
        return places.of(closed.requests[:, None], positions.clamp(min=0)), positions < 0


class Scorer(Module):
    """How much each head of an indexer counts."""

    def __init__(self, size: int, heads: int, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.weights_proj = Linear(size, heads, bias=False, dtype=dtype, device=device)


class Indexer(Compressor):
    """Chooses ``topk`` of the compressed entries for every token, by keys that it compresses from
    the same groups.
    """

    def __init__(
        self,
        params: CompressedParams,
        heads: int,
        dim: int,
        topk: int,
        ratio: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__(params, dim, ratio, overlap=True, device=device)
        self.heads, self.topk = heads, topk
        self.q_b_proj = Linear(
            params.q_lora_rank, heads * dim, bias=False, dtype=dtype, device=device
        )
        self.scorer = Scorer(params.hidden_size, heads, dtype, device)

    def chosen(
        self,
        hidden: Tensor,
        latent: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: CacheView,
    ) -> Tensor:
        """hidden [T, d], latent [T, q_lora_rank] -> int64 [T, k] numbers of entries, -1 behind the
        last.
        """
        q = turn(self.q_b_proj(latent).view(-1, self.heads, self.dim), angles, self.ops)
        weights = (
            self.scorer.weights_proj(hidden).to(angles[0].dtype) * (self.heads * self.dim) ** -0.5
        )
        return self.ops.score_and_choose(q, weights, keys, self.topk)


class CompressedAttention(Module):
    """Attention over a window of entries that are key and value at once; stream ``window``. Kinds
    add entries beside it.
    """

    product: Product | None = None

    def __init__(self, params: CompressedParams, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.params, self.hidden_size = params, params.hidden_size
        linear = partial(Linear, bias=False, dtype=dtype, device=device)
        size, inner = params.hidden_size, params.num_heads * params.head_dim
        self.q_a_proj = linear(size, params.q_lora_rank)
        self.q_a_norm = Norm(
            params.q_lora_rank, params.norm_eps, "wide", dtype=torch.float32, device=device
        )
        self.q_b_proj = linear(params.q_lora_rank, inner)
        self.kv_proj = linear(size, params.head_dim)
        self.kv_norm = Norm(
            params.head_dim, params.norm_eps, "wide", dtype=torch.float32, device=device
        )
        self.o_a_proj = linear(inner // params.o_groups, params.o_groups * params.o_lora_rank)
        self.o_b_proj = linear(params.o_groups * params.o_lora_rank, size)
        self.sinks = nn.Parameter(
            torch.zeros(params.num_heads, dtype=torch.float32, device=device), requires_grad=False
        )

    def prepare(self) -> None:
        """Make the product of each group of heads with its rows of ``o_a_proj``."""
        self.product = self._product()

    def _product(self) -> Product:
        groups, rank = self.params.o_groups, self.params.o_lora_rank
        return self.ops.project_heads(self.o_a_proj.weight.view(groups, rank, -1), flipped=True)

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's entries as the caches' batches say."""
        params, view = self.params, caches["window"]
        angles = step.shared(
            ("angles", params.rope, params.rope_dim, hidden.dtype),
            lambda: angles_at(params, step.positions, hidden.dtype),
        )
        latent = self.q_a_norm(self.q_a_proj(hidden))
        q = self.q_b_proj(latent).view(-1, params.num_heads, params.head_dim)
        q = turn(self.ops.norm(q, None, params.norm_eps, "unit"), angles, self.ops)
        entry = turn(self.kv_norm(self.kv_proj(hidden))[:, None], angles, self.ops)[:, 0]
        far, chosen = self.compressed(hidden, latent, angles, step, caches)
        view.begin(kv=entry)
        mixed = self.ops.attend_sparse(q, view, far, chosen, scale=params.scale, sinks=self.sinks)
        view.end()
        return self._output(turn(mixed, angles, self.ops, back=True))

    def compressed(
        self,
        hidden: Tensor,
        latent: Tensor,
        angles: tuple[Tensor, Tensor],
        step: Step,
        caches: Caches,
    ) -> tuple[CacheView | None, Tensor | None]:
        """Store the step's compressed entries, and say which ones its tokens read beside their
        windows: a stream, and the choice of each, int64 [T, k]; None for all that they see.
        """
        return None, None

    def _output(self, mixed: Tensor) -> Tensor:
        """[T, H, D] -> [T, d]: each group of heads to a few elements, all of them to the output."""
        groups = mixed.reshape(mixed.shape[0], self.params.o_groups, -1)
        return self.o_b_proj((self.product or self._product())(groups).flatten(1))
