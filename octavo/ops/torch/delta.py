"""The gated delta rule, with a decay per head (gated delta net) or per key channel (KDA).

Owns the chunked form: within a chunk, what each token corrects depends on what earlier ones did, a
unit triangular system that is solved once for all tokens. Convolutions, normalisation of q and k
and the scale of q are the caller's. Sources: Yang et al. 2024, "Gated Delta Networks"; Kimi Team
2025, "Kimi Linear". Decays are only ever exponentials of numbers that are not positive.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.ragged import Inputs, Kernel, Ragged, Step, scan, work_dtype
from octavo.ops.states import State
from octavo.ops.torch.linear import CHUNK, cumulative, pair_decay


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: State
) -> Tensor:
    """``DeltaScanOp``."""
    return scanned(q, k, v, log_decay, beta, state, delta_step)


def scanned(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: State, step: Step
) -> Tensor:
    """``delta_scan`` with another single step."""
    before, ragged = state.before(), state.ragged
    out, after = gated_delta(q, k, v, log_decay, beta, before, ragged, step=step)
    state.store(after)
    return out


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    ragged: Ragged,
    *,
    step: Step | None = None,
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S; S = S + k (beta (v - S^T k))^T; out = S^T q``.

    ``q``, ``k`` [T, Hk, Dk] as they are multiplied (normalised and scaled); ``v`` [T, H, Dv], head
    j with key head j Hk // H; ``log_decay`` <= 0, [T, H] or [T, H, Dk]; ``beta`` [T, H]; ``state``
    [R, H, Dk, Dv]. Returns out [T, H, Dv] and the states [E, H, Dk, Dv], both in float32, or
    float64 where anything given is.
    """
    dtype = work_dtype(q, k, v, log_decay, beta, state)
    kernel = Kernel(chunk=_chunk, step=step or delta_step, size=CHUNK)
    inputs = (q, k, v, log_decay, beta)
    return scan(kernel, inputs, state, ragged, out_shape=v.shape[1:], dtype=dtype)


def _chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk. With D_ij the decay from j to i, u_i = beta_i (v_i - (D_i0 S_0)^T k_i - sum_{j<i}
    (k_i D_ij k_j) u_j) and S_i = D_i0 S_0 + sum_{j<=i} D_ij k_j u_j^T.
    """
    q, k, v, log_decay, beta = inputs
    tokens, heads, _ = v.shape
    # k and q of a token side by side: they meet the same keys and the same state.
    rows = torch.stack([k, q], dim=2).repeat_interleave(heads // k.shape[1], dim=1).transpose(0, 1)
    scores, kept, left = (_head_scores if log_decay.dim() == 2 else _channel_scores)(
        rows, log_decay
    )
    reads = ((rows * kept[:, :, None]).flatten(1, 2) @ state).unflatten(1, (tokens, 2))
    gain = beta.T[..., None]
    wanted = (v.transpose(0, 1) - reads[:, :, 0]) * gain
    change = torch.linalg.solve_triangular(
        scores[:, :, 0] * gain, wanted, upper=False, unitriangular=True
    )
    out = torch.baddbmm(reads[:, :, 1], scores[:, :, 1], change)
    after = torch.baddbmm(state * kept[:, -1, :, None], (rows[:, :, 0] * left).mT, change)
    return out.transpose(0, 1), after


# Both functions below take k and q of each token [H, L, 2, D] and log decays [L, H] or [L, H, D],
# and return
# - scores [H, L, 2, L], sum_d row_i[d] D_ij[d] k_j[d] for j < i, and for j = i of q at least; 0 for
#   j > i of q;
# - decays from the chunk's beginning up to each token, and from each token to the chunk's end: [H,
#   L, 1] or [H, L, D].


def _head_scores(rows: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a decay per head, which factors out of the product."""
    sums = cumulative(log_decay)
    scores = (rows.flatten(1, 2) @ rows[:, :, 0].mT).view(*rows.shape[:3], -1) * pair_decay(
        sums, rows.dtype
    )[:, :, None]
    kept, left = ((x.to(rows.dtype).exp().T[..., None]) for x in (sums, sums[-1] - sums))
    return scores, kept, left


def _channel_scores(rows: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With a decay per channel: it cannot be taken out of the product, and one exponential per
    token would overflow.

    Between the later and the earlier half of a block the decay factors at the border, into what is
    left of the earlier tokens there and what the later ones keep of it. So blocks are joined in
    pairs, beginning with single tokens, and all factors are products of decays.
    """
    tokens, heads, width = log_decay.shape
    size = 1 << (tokens - 1).bit_length()
    rows = functional.pad(rows, (0, 0, 0, 0, 0, size - tokens))
    kept = functional.pad(log_decay.transpose(0, 1), (0, 0, 0, size - tokens)).exp_()
    left = torch.ones_like(kept)
    scores = rows.new_zeros(heads, size, 2, size)
    scores[:, :, 1].diagonal(dim1=1, dim2=2).copy_((rows[:, :, 1] * rows[:, :, 0]).sum(-1))
    half = 1
    while half < size:
        pairs = (heads, size // (2 * half), 2, half)
        begin, end, both = (
            kept.view(*pairs, width),
            left.view(*pairs, width),
            rows.view(*pairs, 2, width),
        )
        later = (both[:, :, 1] * begin[:, :, 1, :, None]).flatten(2, 3)
        earlier = both[:, :, 0, :, 0] * end[:, :, 0]
        corner = scores.view(*pairs, 2, *pairs[1:])[:, :, 1, :, :, :, 0].diagonal(dim1=1, dim2=4)
        corner.copy_((later @ earlier.mT).unflatten(2, (half, 2)).permute(0, 2, 3, 4, 1))
        end[:, :, 0] *= begin[:, :, 1, -1:]
        begin[:, :, 1] *= begin[:, :, 0, -1:]
        half *= 2
    return scores[:, :tokens, :, :tokens], kept[:, :tokens], left[:, :tokens]


def delta_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n requests."""
    q, k, v, log_decay, beta = inputs
    share = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1)
    kept = state * log_decay.exp().view(*v.shape[:2], -1, 1)
    change = (v - (k[..., None, :] @ kept)[..., 0, :]) * beta[..., None]
    after = torch.addcmul(kept, k[..., None], change[..., None, :])
    return (q[..., None, :] @ after)[..., 0, :], after
