"""What single calls of the kernels over entries and states compute, written slowly: for tests of
kernels by themselves. ``octavo/ops/oracles`` is about whole ops.

Everything is float64 and one number at a time where that is bearable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """One query's scores: q [H, D], weights [H], keys [L, D] -> [L]."""
    products = torch.einsum("hd,ld->hl", q.double(), keys.double())
    return (products.clamp(min=0) * weights.double()[:, None]).sum(dim=0)


def choose(scores: Sequence[float], k: int) -> list[int]:
    """Numbers of the ``k`` highest, of equal ones the lowest, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:k])


def attention(
    q: Tensor, entries: Tensor, value_dim: int, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """One query's heads q [H, D] over entries [L, D], whose first ``value_dim`` elements are
    values: [H, value_dim].
    """
    scores = q.double() @ entries.double().T * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
    return torch.softmax(scores, dim=1)[:, : len(entries)] @ entries[:, :value_dim].double()


def decayed_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One head: q, k [N], v [P], log_decay [], state [P, N] -> out [P] and the state after."""
    after = state.double() * log_decay.double().exp() + torch.outer(v.double(), k.double())
    return after @ q.double(), after


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One head: q, k [Dk], v [Dv], log_decay [] or [Dk], beta [], state [Dk, Dv] -> out [Dv] and
    the state after.
    """
    kept = state.double() * log_decay.double().exp().view(-1, 1)
    change = beta.double() * (v.double() - kept.T @ k.double())
    after = kept + torch.outer(k.double(), change)
    return after.T @ q.double(), after
