"""Selective state space models: Mamba-1's scan and Mamba-2's state space duality.

Owns the recurrences from discretised inputs on; convolution, softplus, the skip ``D x``, gate and
norm are the caller's.
Sources: Gu and Dao 2023, "Mamba"; Dao and Gu 2024, "Transformers are SSMs".
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.ragged import Inputs, Kernel, Ragged, Step, scan, work_dtype
from octavo.ops.states import State
from octavo.ops.torch.linear import CHUNK, decayed_chunk, decayed_step, recur

# Mamba-1 has no form in matrix products: a chunk holds the states after all its tokens, which
# should fit a cache.
_STATES = 16


def selective_scan(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: State) -> Tensor:
    """``SelectiveScanOp``."""
    y, after = selective(u, dt, a, b, c, state.before(), state.ragged)
    state.store(after)
    return y


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: State,
    step: Step = decayed_step,
) -> Tensor:
    """``SsdScanOp``, possibly with another single step."""
    y, after = state_space_duality(x, dt, a, b, c, state.before(), state.ragged, step=step)
    state.store(after)
    return y


def selective(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """Mamba-1: ``h = exp(dt a) h + dt u b^T; y = h c``, with a decay per channel and state.

    ``u`` and ``dt`` > 0 [T, I], ``a`` [I, N] < 0, ``b`` and ``c`` [T, N], ``state`` [R, I, N].
    Returns ``y`` [T, I] and the states [E, I, N], both in float32, or float64 where anything given
    is.
    """
    dtype = work_dtype(u, dt, a, b, c, state)
    # Channels last, since they are many and states per channel few.
    rate = a.to(dtype).T.contiguous()

    def discretise(inputs: Inputs) -> tuple[Tensor, Tensor]:
        u, dt, b, _ = inputs
        return (dt[..., None, :] * rate).exp_(), (dt * u)[..., None, :] * b[..., None]

    def chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        states = recur(*discretise(inputs), state, width=1)
        return (inputs[3][..., None, :] @ states)[..., 0, :], states[-1]

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        decay, push = discretise(inputs)
        after = push.addcmul_(decay, state)
        return (inputs[3][..., None, :] @ after)[..., 0, :], after

    kernel = Kernel(chunk=chunk, step=step, size=_STATES)
    y, emitted = scan(kernel, (u, dt, b, c), state.mT, ragged, out_shape=u.shape[1:], dtype=dtype)
    return y, emitted.mT


def state_space_duality(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    ragged: Ragged,
    *,
    step: Step = decayed_step,
) -> tuple[Tensor, Tensor]:
    """Mamba-2: ``h = exp(dt a) h + dt x b^T; y = h c``, in the block form of SSD.

    ``x`` [T, H, P], ``dt`` [T, H] > 0, ``a`` [H] < 0, ``b`` and ``c`` [T, G, N] (head j reads group
    j G // H), ``state`` [R, H, P, N]. Returns ``y`` [T, H, P] and the states [E, H, P, N], both in
    float32, or float64 where anything given is.
    """
    dtype = work_dtype(x, dt, a, b, c, state)
    rate = a.to(dtype)

    def discretise(inputs: Inputs) -> Inputs:
        x, dt, b, c = inputs
        return c, b, x * dt[..., None], dt * rate

    kernel = Kernel(
        chunk=lambda inputs, now: decayed_chunk(discretise(inputs), now),
        step=lambda inputs, now: step(discretise(inputs), now),
        size=CHUNK,
    )
    return scan(kernel, (x, dt, b, c), state, ragged, out_shape=x.shape[1:], dtype=dtype)
