"""What products with a model's weights are, slowly: each takes weights and x at once, in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.activation import Gating
from octavo.ops.table import ExpertWeights


def project(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """``ProjectOp``."""
    y = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return y if bias is None else y + bias.double()


def project_together(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], x: Tensor
) -> list[Tensor]:
    """``ProjectTogetherOp``."""
    return [project(weight, bias, x) for weight, bias in zip(weights, biases, strict=True)]


def gated(
    gate: Tensor,
    up: Tensor,
    gating: Gating,
    biases: tuple[Tensor | None, Tensor | None],
    x: Tensor,
) -> Tensor:
    """``GatedOp``. Both products are rounded to x's dtype first, as everywhere."""
    both = (project(one, bias, x) for one, bias in zip((gate, up), biases, strict=True))
    return mixed(gating, *(one.to(x.dtype).double() for one in both))


def mixed(gating: Gating, gate: Tensor, up: Tensor) -> Tensor:
    """``Gating.mix``, by the formulas."""
    if gating.clamp is not None:
        limit, alpha = gating.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate / (1 + (-alpha * gate).exp())
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return activated(gating.activation, gate) * up


def activated(name: str, x: Tensor) -> Tensor:
    """The activation of that name."""
    if name == "silu":
        return x / (1 + (-x).exp())
    if name == "relu2":
        return x.clamp(min=0) ** 2
    return F.gelu(x, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")


def project_heads(weight: Tensor, flipped: bool, x: Tensor) -> Tensor:
    """``ProjectHeadsOp``."""
    return torch.einsum("nhi,hoi->nho" if flipped else "nhi,hio->nho", x.double(), weight.double())


def experts(weights: ExpertWeights, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """``ExpertsOp``, token by token and expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for score, expert in zip(scores[token].double(), chosen[token].tolist(), strict=True):
            first, last = (
                None if bias is None else bias[expert]
                for bias in (weights.first_bias, weights.last_bias)
            )
            given = row * score if weights.scores_inputs else row
            made = project(weights.first[expert], first, given)
            if isinstance(weights.gating, str):
                inner = activated(weights.gating, made)
            else:
                inner = mixed(weights.gating, *made.chunk(2))
            made = project(weights.last[expert], last, inner)
            out[token] += made if weights.scores_inputs else made * score
    return out
