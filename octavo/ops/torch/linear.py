"""Linear attention with a decay per head, and the elementwise linear recurrence, in chunks.

Owns the forms that other recurrences are built from. Sources: Qin et al. 2024, "Lightning
Attention-2"; Katharopoulos et al. 2020, "Transformers are RNNs"; De et al. 2024, "Griffin".
Projections, norms and gates are the caller's. Decays are only ever exponentials of numbers that are
not positive, and products of those: nothing is divided by a decay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.ragged import LOG_ZERO, Inputs, Kernel, Ragged, Step, scan, work_dtype
from octavo.ops.states import State

CHUNK = 64
_RECURRENCE_WIDTH = 16


def cumulative(log_decay: Tensor) -> Tensor:
    """Sums of log decays [L, ...] up to each token, in float64, so that differences of large sums
    are exact in float32.
    """
    return log_decay.to(torch.float64).clamp(min=LOG_ZERO).cumsum(0)


def pair_decay(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left at token i of what came in at j <= i, and 0 for j > i: [H, L, L], from
    ``cumulative`` sums [L, H].
    """
    sums = sums.T.contiguous()
    logs = (sums[:, :, None] - sums[:, None, :]).to(dtype)
    later = torch.ones(logs.shape[1:], dtype=torch.bool, device=logs.device).triu(1)
    return logs.masked_fill_(later, -torch.inf).exp_()


def decayed_chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of ``S = exp(log_decay) S + v k^T; out = S q``.

    ``inputs``: q, k [L, G, N], v [L, H, P], log_decay [L, H] <= 0, where each of G groups serves H
    / G heads in turn; ``state`` is [H, P, N]. Returns out [L, H, P] and the state after the chunk.
    """
    q, k, v, log_decay = inputs
    tokens, heads, width = v.shape
    groups = q.shape[1]
    sums = cumulative(log_decay)
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    scores = (q @ k.mT)[:, None] * pair_decay(sums, v.dtype).view(groups, -1, tokens, tokens)
    inside = (scores.view(heads, tokens, tokens) @ v.transpose(0, 1)).transpose(0, 1)
    # A group's heads lie next to each other in the state: one product reads them all, one writes
    # them all.
    grouped = state.reshape(groups, -1, state.shape[-1])
    before = (q @ grouped.mT).transpose(0, 1).reshape(tokens, heads, width)
    out = torch.addcmul(inside, before, sums.to(v.dtype).exp()[..., None])
    pushed = (v * (sums[-1] - sums).to(v.dtype).exp()[..., None]).view(tokens, groups, -1)
    after = torch.addcmul(
        (pushed.permute(1, 2, 0) @ k).view(state.shape),
        state,
        sums[-1].to(v.dtype).exp()[:, None, None],
    )
    return out, after


def decayed_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n requests: shapes as in ``decayed_chunk`` with n for L; ``state`` is
    [n, H, P, N].
    """
    q, k, v, log_decay = inputs
    share = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1)
    after = torch.addcmul(state * log_decay.exp()[..., None, None], v[..., None], k[..., None, :])
    return (after @ q[..., None])[..., 0], after


def decayed_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: State, step: Step = decayed_step
) -> Tensor:
    """``DecayedScanOp``, possibly with another single step."""
    out, after = decayed_attention(q, k, v, log_decay, state.before(), state.ragged, step=step)
    state.store(after)
    return out


def feature_scan(
    q: Tensor, k: Tensor, v: Tensor, sums: State, keys: State, step: Step = decayed_step
) -> Tensor:
    """``FeatureScanOp``, possibly with another single step of the sums."""
    before = sums.before(), keys.before()
    out, (after, normaliser) = feature_attention(q, k, v, before, sums.ragged, step=step)
    sums.store(after)
    keys.store(normaliser)
    return out


def linear_scan(a: Tensor, b: Tensor, state: State) -> Tensor:
    """``LinearScanOp``."""
    out, after = linear_recurrence(a, b, state.before(), state.ragged)
    state.store(after)
    return out


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    ragged: Ragged,
    *,
    step: Step = decayed_step,
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S + k v^T; out = S^T q``: linear attention with a decay per head.

    ``q``, ``k`` [T, H, Dk], ``v`` [T, H, Dv], ``log_decay`` <= 0, [H] where it is the same for all
    tokens (lightning attention), or [T, H]; ``state`` [R, H, Dk, Dv]. Returns out [T, H, Dv] and
    the states [E, H, Dk, Dv], both in float32, or float64 where anything given is.
    """
    dtype = work_dtype(q, k, v, log_decay, state)
    inputs = (q, k, v, log_decay.expand(*v.shape[:2]))
    kernel = Kernel(chunk=decayed_chunk, step=step, size=CHUNK)
    out, emitted = scan(kernel, inputs, state.mT, ragged, out_shape=v.shape[1:], dtype=dtype)
    return out, emitted.mT


def feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor],
    ragged: Ragged,
    *,
    eps: float = 1e-6,
    step: Step = decayed_step,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """``S = S + f(k) v^T; z = z + f(k); out = S^T f(q) / (z f(q) + eps)`` with the feature map f(x)
    = elu(x) + 1: plain linear attention.

    ``q``, ``k`` [T, H, Dk], ``v`` [T, H, Dv], ``state`` S [R, H, Dk, Dv] and z [R, H, Dk]. Returns
    out [T, H, Dv] and the states [E, H, Dk, Dv] and [E, H, Dk], all in float32, or float64 where
    anything given is.
    """
    dtype = work_dtype(q, k, v, *state)

    def features(inputs: Inputs) -> Inputs:
        q, k, v = inputs
        # z is what S would be for a value that is always 1, so it is carried as one more row of it.
        values = functional.pad(v, (0, 1), value=1.0)
        return (
            functional.elu(q) + 1,
            functional.elu(k) + 1,
            values,
            values.new_zeros(1, 1).expand(values.shape[:2]),
        )

    def normalised(out: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return out[..., :-1] / (out[..., -1:] + eps), after

    kernel = Kernel(
        chunk=lambda inputs, now: normalised(*decayed_chunk(features(inputs), now)),
        step=lambda inputs, now: normalised(*step(features(inputs), now)),
        size=CHUNK,
    )
    whole = torch.cat([state[0].to(dtype).mT, state[1].to(dtype)[..., None, :]], dim=-2)
    out, emitted = scan(kernel, (q, k, v), whole, ragged, out_shape=v.shape[1:], dtype=dtype)
    return out, (emitted[..., :-1, :].mT, emitted[..., -1, :])


def linear_recurrence(a: Tensor, b: Tensor, state: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """``h = a h + b``, elementwise: the core of RG-LRU.

    ``a`` in [0, 1] (0 forgets, as at a first token) and ``b`` [T, W], ``state`` [R, W]. Returns h
    after every token [T, W] and the states [E, W], both in float32, or float64 where anything given
    is.
    """
    return scan(
        _RECURRENCE, (a, b), state, ragged, out_shape=b.shape[1:], dtype=work_dtype(a, b, state)
    )


def recur(decay: Tensor, push: Tensor, state: Tensor, *, width: int) -> Tensor:
    """All states of ``h = decay h + push`` [L, ...]. Overwrites ``decay`` and ``push`` [L, ...],
    both contiguous.

    Blocks of ``width`` tokens are scanned side by side from zero, and then what each begins with is
    added, block after
    block: about width + L / width operations instead of L. A width of 1 is the plain loop: less
    arithmetic, for states large enough to fill an operation.
    """
    tokens = len(push)
    whole = tokens - tokens % width
    blocks, decays = push[:whole].unflatten(0, (-1, width)), decay[:whole].unflatten(0, (-1, width))
    for i in range(1, width):
        blocks[:, i].addcmul_(decays[:, i], blocks[:, i - 1])
        decays[:, i].mul_(decays[:, i - 1])
    for block, kept in zip(
        (*blocks, *push[whole:, None]), (*decays, *decay[whole:, None]), strict=True
    ):
        block.addcmul_(kept, state)
        state = block[-1]
    return push


def _recurrence_chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    states = recur(inputs[0].clone(), inputs[1].clone(), state, width=_RECURRENCE_WIDTH)
    return states, states[-1]


def _recurrence_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    after = torch.addcmul(inputs[1], inputs[0], state)
    return after, after


_RECURRENCE = Kernel(chunk=_recurrence_chunk, step=_recurrence_step, size=_RECURRENCE_WIDTH**2)
