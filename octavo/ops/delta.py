"""The gated delta rule, with a decay per head (gated delta net) or per key channel (KDA).

Owns the chunked form: within a chunk, what each token corrects depends on what earlier ones did, a unit triangular system
that is solved once for all tokens. Convolutions, normalisation of q and k and the scale of q are the caller's. Sources:
Yang et al. 2024, "Gated Delta Networks"; Kimi Team 2025, "Kimi Linear". Decays are only ever exponentials of numbers that
are not positive.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.linear import CHUNK, cumulative, pair_decay
from octavo.ops.ragged import Inputs, Kernel, Ragged, scan, work_dtype


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S; S = S + k (beta (v - S^T k))^T; out = S^T q``.

    ``q``, ``k`` [T, Hk, Dk] as they are multiplied (normalised and scaled); ``v`` [T, H, Dv], head j with key
    head j Hk // H; ``log_decay`` <= 0, [T, H] or [T, H, Dk]; ``beta`` [T, H]; ``state`` [R, H, Dk, Dv]. Returns out
    [T, H, Dv] and the states [E, H, Dk, Dv], both in float32, or float64 where anything given is.
    """
    dtype = work_dtype(q, k, v, log_decay, beta, state)
    return scan(_KERNEL, (q, k, v, log_decay, beta), state, ragged, out_shape=v.shape[1:], dtype=dtype)


def _chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk. With D_ij the decay from j to i, u_i = beta_i (v_i - (D_i0 S_0)^T k_i - sum_{j<i} (k_i D_ij k_j) u_j) and
    S_i = D_i0 S_0 + sum_{j<=i} D_ij k_j u_j^T."""
    q, k, v, log_decay, beta = inputs
    tokens, heads, _ = v.shape
    share = heads // k.shape[1]
    # Rows of k and q, which meet the same keys and the same state.
    rows = torch.cat([k, q]).repeat_interleave(share, dim=1).transpose(0, 1)
    sums = cumulative(log_decay)
    scores = _pair_scores(rows, sums)
    channels = sums.view(tokens, heads, -1).transpose(0, 1)
    kept = channels.to(v.dtype).exp()
    reads = (rows * torch.cat([kept, kept], dim=1)) @ state
    gain = beta.T[..., None]
    wanted = (v.transpose(0, 1) - reads[:, :tokens]) * gain
    change = torch.linalg.solve_triangular(scores[:, :tokens] * gain, wanted, upper=False, unitriangular=True)
    out = torch.baddbmm(reads[:, tokens:], scores[:, tokens:], change)
    pushed = rows[:, :tokens] * (channels[:, -1:] - channels).to(v.dtype).exp()
    after = torch.baddbmm(state * kept[:, -1, :, None], pushed.mT, change)
    return out.transpose(0, 1), after


def _pair_scores(rows: Tensor, sums: Tensor) -> Tensor:
    """Decayed products of all rows with earlier keys: [H, 2L, L], the rows of k and then of q [H, 2L, Dk]; 0 for later
    keys, and where a key meets itself only q's rows are to be used."""
    tokens = sums.shape[0]
    if sums.dim() == 2:
        decay = pair_decay(sums, rows.dtype)
        return (rows @ rows[:, :tokens].mT) * torch.cat([decay, decay], dim=1)
    return _channel_scores(rows.unflatten(1, (2, tokens)), sums.transpose(0, 1)).flatten(1, 2)


def _channel_scores(rows: Tensor, sums: Tensor) -> Tensor:
    """``sum_d row_i[d] exp(sums_i[d] - sums_j[d]) key_j[d]`` for j <= i: [H, 2, L, L], of ``rows`` [H, 2, L, D] and
    ``sums`` [H, L, D].

    A decay per channel does not factor out of the product, and exp(sums_i) exp(-sums_j) would overflow. Between the later
    and the earlier half of a block it factors at the border, exp(sums_i - border) exp(border - sums_j), with neither
    exponent positive. So the block is halved until single tokens are left.
    """
    heads, _, tokens, width = rows.shape
    size = 1 << (tokens - 1).bit_length()
    rows = functional.pad(rows, (0, 0, 0, size - tokens))
    sums = torch.cat([sums, sums[:, -1:].expand(-1, size - tokens, -1)], dim=1)
    scores = rows.new_zeros(heads, 2, size, size)
    scores.diagonal(dim1=2, dim2=3).copy_((rows * rows[:, :1]).sum(-1))
    half = size // 2
    while half:
        blocks = size // (2 * half)
        logs = sums.view(heads, blocks, 2, half, width)
        border = logs[:, :, 0, -1:]
        halves = rows.view(heads, 2, blocks, 2, half, width)
        later = halves[:, :, :, 1] * (logs[:, :, 1] - border).to(rows.dtype).exp()[:, None]
        earlier = halves[:, :1, :, 0] * (border - logs[:, :, 0]).to(rows.dtype).exp()[:, None]
        corner = scores.view(heads, 2, blocks, 2, half, blocks, 2, half)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)
        corner.copy_((later @ earlier.mT).permute(0, 1, 3, 4, 2))
        half //= 2
    return scores[:, :, :tokens, :tokens]


def _step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n requests."""
    q, k, v, log_decay, beta = inputs
    share = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1)
    kept = state * log_decay.exp().view(*v.shape[:2], -1, 1)
    change = (v - (k[..., None, :] @ kept)[..., 0, :]) * beta[..., None]
    after = torch.addcmul(kept, k[..., None], change[..., None, :])
    return (q[..., None, :] @ after)[..., 0, :], after


_KERNEL = Kernel(chunk=_chunk, step=_step, size=CHUNK)
