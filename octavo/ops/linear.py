"""Linear attention with a decay per head, and the elementwise linear recurrence, in chunks.

Owns the forms that other recurrences are built from. Sources: Qin et al. 2024, "Lightning Attention-2"; Katharopoulos et
al. 2020, "Transformers are RNNs"; De et al. 2024, "Griffin". Projections, norms and gates are the caller's. Decays are only
ever exponentials of numbers that are not positive, and products of those: nothing is divided by a decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.ragged import LOG_ZERO, Inputs, Kernel

CHUNK = 64
_RECURRENCE_CHUNK = 256


def cumulative(log_decay: Tensor) -> Tensor:
    """Sums of log decays [L, ...] up to each token, in float64, so that differences of large sums are exact in float32."""
    return log_decay.to(torch.float64).clamp(min=LOG_ZERO).cumsum(0)


def pair_decay(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left at token i of what came in at j <= i, and 0 for j > i: [H, L, L], from ``cumulative`` sums [L, H]."""
    sums = sums.T.contiguous()
    logs = (sums[:, :, None] - sums[:, None, :]).to(dtype)
    later = torch.ones(logs.shape[1:], dtype=torch.bool, device=logs.device).triu(1)
    return logs.masked_fill_(later, -torch.inf).exp_()


def decayed_chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of ``S = exp(log_decay) S + v k^T; out = S q``.

    ``inputs``: q, k [L, G, N], v [L, H, P], log_decay [L, H] <= 0, where each of G groups serves H / G heads in turn;
    ``state`` is [H, P, N]. Returns out [L, H, P] and the state after the chunk.
    """
    q, k, v, log_decay = inputs
    tokens, heads, width = v.shape
    groups = q.shape[1]
    sums = cumulative(log_decay)
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    scores = (q @ k.mT)[:, None] * pair_decay(sums, v.dtype).view(groups, -1, tokens, tokens)
    inside = (scores.view(heads, tokens, tokens) @ v.transpose(0, 1)).transpose(0, 1)
    # A group's heads lie next to each other in the state: one product reads them all, one writes them all.
    grouped = state.reshape(groups, -1, state.shape[-1])
    before = (q @ grouped.mT).transpose(0, 1).reshape(tokens, heads, width)
    out = torch.addcmul(inside, before, sums.to(v.dtype).exp()[..., None])
    pushed = (v * (sums[-1] - sums).to(v.dtype).exp()[..., None]).view(tokens, groups, -1)
    after = torch.addcmul((pushed.permute(1, 2, 0) @ k).view(state.shape), state, sums[-1].to(v.dtype).exp()[:, None, None])
    return out, after


def decayed_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n requests: shapes as in ``decayed_chunk`` with n for L; ``state`` is [n, H, P, N]."""
    q, k, v, log_decay = inputs
    share = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1)
    after = torch.addcmul(state * log_decay.exp()[..., None, None], v[..., None], k[..., None, :])
    return (after @ q[..., None])[..., 0], after


DECAYED = Kernel(chunk=decayed_chunk, step=decayed_step, size=CHUNK)
