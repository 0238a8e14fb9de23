"""The torch layer of sparse latent attention: ``nn.latent`` over the tokens that an indexer picks.

Owns the indexer's projections and the handing of its choice to the layers that share it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.kinds.dsa.spec import SparseLatent
from octavo.nn.latent import LatentAttention, turn
from octavo.nn.linear import Linear
from octavo.nn.module import Module
from octavo.nn.step import Caches, Step
from octavo.ops.paged import CacheView

CHOICE = "tokens chosen by the nearest indexer"
"""Where in a step's memo a layer leaves its choice."""

KEY_EPS = 1e-6
"""Of the LayerNorm over index keys, whatever the model's own epsilon."""


class Indexer(Module):
    """The lightning indexer (DeepSeek-V3.2): index keys with a norm, weighted queries, the tokens
    that score best.
    """

    def __init__(self, kind: SparseLatent, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        assert kind.latent.q_lora_rank is not None and kind.latent.rope is not None, (
            "the spec sees to both"
        )
        self.kind, self.rope = kind, replace(kind.latent.rope, interleaved=kind.index_interleaved)
        size, heads, dim = kind.latent.hidden_size, kind.index_heads, kind.index_dim
        self.wq_b = Linear(
            kind.latent.q_lora_rank, heads * dim, bias=False, dtype=dtype, device=device
        )
        self.wk = Linear(size, dim, bias=False, dtype=dtype, device=device)
        self.k_norm = nn.LayerNorm(dim, eps=KEY_EPS, dtype=dtype, device=device)
        self.weights_proj = Linear(size, heads, bias=False, dtype=dtype, device=device)

    def key(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, d] -> index keys [T, D], whose front is rotated."""
        return turn(
            self.k_norm(self.wk(hidden))[:, None],
            self.rope,
            self.kind.latent.rope_dim,
            step,
            self.ops,
        )[:, 0]

    def queries(self, hidden: Tensor, source: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """-> queries [T, H, D] and the weights of heads [T, H], in float32 at least, with all
        constant factors.
        """
        kind = self.kind
        q = turn(
            self.wq_b(source).view(-1, kind.index_heads, kind.index_dim),
            self.rope,
            kind.latent.rope_dim,
            step,
            self.ops,
        )
        weights = self.weights_proj(hidden)
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, wide * float(kind.index_heads * kind.index_dim) ** -0.5

    def forward(self, hidden: Tensor, source: Tensor, step: Step, view: CacheView) -> Tensor | None:
        """The tokens that each of the step's attends to, int64 [T, k]; None where all that are seen
        are chosen.
        """
        view.keep(key=self.key(hidden, step))
        if step.parts.stop.max() <= self.kind.index_topk:
            return None
        q, weights = self.queries(hidden, source, step)
        return self.ops.score_and_choose(q, weights, view, self.kind.index_topk)


class SparseLatentLayer(LatentAttention):
    """Causal attention over the ``index_topk`` latents with the highest index scores, or those of
    the nearest layer before.
    """

    def __init__(self, kind: SparseLatent, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(kind.latent, dtype=dtype, device=device)
        self.indexer = None if kind.shares_index else Indexer(kind, dtype, device)

    def choose(self, hidden: Tensor, source: Tensor, step: Step, caches: Caches) -> Tensor | None:
        """This layer's own choice, left for those that share it, or the one that was left last."""
        if self.indexer is not None:
            step.memo[CHOICE] = self.indexer(hidden, source, step, caches["index"])
        chosen: Tensor | None = step.memo[CHOICE]
        return chosen
