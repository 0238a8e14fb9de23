"""Single steps of recurrent states: one token of each of n requests.

Owns the calls of csrc/recurrent.cpp. ``sparse_reference.py`` says what they compute.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from octavo.kernels.library import Library, library


class _Call(ctypes.Structure):
    """``struct Step``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "decay", "beta", "out", "state", "after")),
        *((name, ctypes.c_int64) for name in ("state_request", "after_request", "count", "heads", "key_heads")),
        *((name, ctypes.c_int64) for name in ("keys", "values", "decay_keys")),
    )


def takes(state: Tensor) -> bool:
    """Whether steps of states [n, H, ...] are computed here: float32 on a CPU, a request's heads one after another."""
    known = state.device.type == "cpu" and state.dtype == torch.float32 and library() is not None
    return known and len(state) > 0 and state[0].is_contiguous()


def decayed_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, kernels: Library | None = None
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S + v k^T; out = S q``: one token of state space duality, or of linear attention.

    q, k: [n, G, N], head j reads G * j // H; v: [n, H, P]; log_decay: [n, H]; state: [n, H, P, N]. Returns out [n, H, P] and
    the state after, a new tensor. All float32.
    """
    return _run("decayed_step", q, k, v, log_decay, None, state, (state.shape[3], state.shape[2]), kernels)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, kernels: Library | None = None
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S; S = S + k (beta (v - S^T k))^T; out = S^T q``: one token of the gated delta rule.

    q, k: [n, Hk, Dk], head j reads Hk * j // H; v: [n, H, Dv]; log_decay: [n, H] or [n, H, Dk]; beta: [n, H];
    state: [n, H, Dk, Dv]. Returns out [n, H, Dv] and the state after, a new tensor. All float32.
    """
    return _run("delta_step", q, k, v, log_decay, beta, state, (state.shape[2], state.shape[3]), kernels)


def _run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    sizes: tuple[int, int],
    kernels: Library | None,
) -> tuple[Tensor, Tensor]:
    kernels, (keys, values) = kernels or library(), sizes
    assert kernels is not None, "takes() says where this may be called"
    count, heads = state.shape[:2]
    assert q.shape == k.shape == (count, q.shape[1], keys) and v.shape == (count, heads, values) and heads % q.shape[1] == 0
    assert log_decay.shape[:2] == (count, heads) and log_decay.shape[2:] in ((), (keys,)) and state[0].is_contiguous()
    given = tuple(None if x is None else x.contiguous() for x in (q, k, v, log_decay, beta))
    assert all(x is None or x.dtype == torch.float32 for x in (*given, state)), "states are kept and computed in float32"
    out, after = v.new_empty(v.shape), torch.empty(state.shape)
    call = _Call(
        *(None if x is None else x.data_ptr() for x in given),
        *(x.data_ptr() for x in (out, state, after)),
        *(state.stride(0), after.stride(0), count, heads, q.shape[1], keys, values),
        1 if log_decay.dim() == 2 else keys,
    )
    kernels.function(name, ctypes.c_void_p, ctypes.c_int)(ctypes.addressof(call), torch.get_num_threads())
    return out, after
