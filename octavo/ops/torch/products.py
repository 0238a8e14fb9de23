"""Products with a model's weights in plain PyTorch: matrices, matrices by head, and experts.

Owns the calls; each is made for its weights once. The order of operations is Transformers', so that
float32 results agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.activation import ACTIVATIONS, Gating
from octavo.ops.table import Experts, ExpertWeights, Product


def project(weight: Tensor, bias: Tensor | None) -> Product:
    """``ProjectOp``."""
    return lambda x: F.linear(x, weight, bias)


def project_together(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Callable[[Tensor], Sequence[Tensor]]:
    """``ProjectTogetherOp``."""
    pairs = tuple(zip(weights, biases, strict=True))
    return lambda x: [F.linear(x, weight, bias) for weight, bias in pairs]


def gated(
    gate: Tensor,
    up: Tensor,
    gating: Gating,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Product:
    """``GatedOp``."""
    first, second = project(gate, biases[0]), project(up, biases[1])
    return lambda x: gating.mix(first(x), second(x))


def project_heads(weight: Tensor, *, flipped: bool = False) -> Product:
    """``ProjectHeadsOp``."""
    maps = weight.transpose(1, 2) if flipped else weight
    return lambda x: torch.bmm(x.transpose(0, 1), maps).transpose(0, 1)


def experts(weights: ExpertWeights) -> Experts:
    """``ExpertsOp``: expert after expert, each over all tokens that took it."""

    def run(x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(weights.first)).tolist()
        tokens, factors = order // chosen.shape[1], scores.flatten()[order, None]
        out, start = torch.zeros_like(x), 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                taken = tokens[mine]
                out.index_add_(0, taken, _expert(weights, expert, x[taken], factors[mine]))
                start += count
        return out

    return run


def _expert(weights: ExpertWeights, expert: int, x: Tensor, scores: Tensor) -> Tensor:
    """x [n, size], scores [n, 1] -> [n, size], scored."""
    first, last = (
        None if bias is None else bias[expert] for bias in (weights.first_bias, weights.last_bias)
    )
    if weights.scores_inputs:
        return _down(weights, expert, F.linear(x * scores, weights.first[expert], first), last)
    return _down(weights, expert, F.linear(x, weights.first[expert], first), last) * scores


def _down(weights: ExpertWeights, expert: int, made: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(weights.gating, str):
        mixed = ACTIVATIONS[weights.gating](made)
    else:
        mixed = weights.gating.mix(*made.chunk(2, dim=-1))
    return F.linear(mixed, weights.last[expert], bias)
