"""Single steps of recurrent states: one token of each of n requests, from tensor to tensor or from
page to page.

Owns ``Places`` and the calls of csrc/recurrent.cpp. ``octavo/ops/oracles`` says what they compute.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.library import Library, library


class _Call(ctypes.Structure):
    """``struct Step``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "decay", "beta", "out", "state", "after")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("state_head", "after_head", "count", "heads", "key_heads")
        ),
        *((name, ctypes.c_int64) for name in ("keys", "values", "decay_keys")),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where states of n requests lie ahead of a step and behind it.

    data: float32 [starts, H, entries, ...], a field over the arena. pages, rows: int64 [n], where
    they are read; known: bool [n], False where a request has none yet and begins with zeros.
    to_pages, to_rows: int64 [n], where they are written: its own place or one that no other request
        reads.
    """

    data: Tensor
    pages: Tensor
    rows: Tensor
    known: Tensor
    to_pages: Tensor
    to_rows: Tensor

    @property
    def addresses(self) -> tuple[Tensor, Tensor]:
        """int64 [n] each: of the states read, 0 where there is none, and of those written."""
        page, row = (self.data.stride(axis) * 4 for axis in (0, 2))
        before = self.data.data_ptr() + self.pages * page + self.rows * row
        return (
            before.where(self.known, 0),
            self.data.data_ptr() + self.to_pages * page + self.to_rows * row,
        )


def decayed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    kernels: Library | None = None,
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S + v k^T; out = S q``: one token of state space duality, or of linear
    attention.

    q, k: [n, G, N], head j reads G * j // H; v: [n, H, P]; log_decay: [n, H]; state: [n, H, P, N].
    Returns out [n, H, P] and the state after, a new tensor. All float32.
    """
    after = torch.empty(state.shape)
    sizes = (state.shape[3], state.shape[2])
    return (
        _run(
            "decayed_step",
            (q, k, v, log_decay, None),
            _rows(state),
            _rows(after),
            _heads(state, after),
            sizes,
            kernels,
        ),
        after,
    )


def decayed_step_in_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    places: Places,
    *,
    kernels: Library | None = None,
) -> Tensor:
    """``decayed_step`` of states in pages: returns out, and leaves the states where they are to
    be.
    """
    *_, values, keys = places.data.shape
    head = places.data.stride(1)
    return _run(
        "decayed_step",
        (q, k, v, log_decay, None),
        *places.addresses,
        (head, head),
        (keys, values),
        kernels,
    )


def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    kernels: Library | None = None,
) -> tuple[Tensor, Tensor]:
    """``S = exp(log_decay) S; S = S + k (beta (v - S^T k))^T; out = S^T q``: one token of the gated
    delta rule.

    q, k: [n, Hk, Dk], head j reads Hk * j // H; v: [n, H, Dv]; log_decay: [n, H] or [n, H, Dk];
        beta: [n, H];
    state: [n, H, Dk, Dv]. Returns out [n, H, Dv] and the state after, a new tensor. All float32.
    """
    after = torch.empty(state.shape)
    sizes = (state.shape[2], state.shape[3])
    return (
        _run(
            "delta_step",
            (q, k, v, log_decay, beta),
            _rows(state),
            _rows(after),
            _heads(state, after),
            sizes,
            kernels,
        ),
        after,
    )


def delta_step_in_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    places: Places,
    *,
    kernels: Library | None = None,
) -> Tensor:
    """``delta_step`` of states in pages: returns out, and leaves the states where they are to
    be.
    """
    *_, keys, values = places.data.shape
    head = places.data.stride(1)
    return _run(
        "delta_step",
        (q, k, v, log_decay, beta),
        *places.addresses,
        (head, head),
        (keys, values),
        kernels,
    )


def _rows(state: Tensor) -> Tensor:
    """Addresses of requests' states."""
    assert state.dtype == torch.float32 and state[0].is_contiguous(), (
        "float32, a request's heads one after another"
    )
    return state.data_ptr() + 4 * state.stride(0) * torch.arange(len(state))


def _heads(*states: Tensor) -> tuple[int, ...]:
    return tuple(state.stride(1) for state in states)


def _run(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    before: Tensor,
    after: Tensor,
    head: tuple[int, ...],
    sizes: tuple[int, int],
    kernels: Library | None,
) -> Tensor:
    """before, after: int64 [n] addresses. head: elements between heads there. sizes: keys and
    values.
    """
    kernels, (keys, values) = kernels or library(), sizes
    assert kernels is not None, "there are compiled kernels, for the dtype"
    q, k, v, log_decay, _ = inputs
    count, heads = v.shape[:2]
    assert (
        q.shape == k.shape == (count, q.shape[1], keys)
        and v.shape == (count, heads, values)
        and heads % q.shape[1] == 0
    )
    assert (
        log_decay.shape[:2] == (count, heads)
        and log_decay.shape[2:] in ((), (keys,))
        and len(before) == len(after) == count
    )
    given = tuple(None if x is None else x.contiguous() for x in inputs)
    assert all(x is None or x.dtype == torch.float32 for x in given), (
        "states are kept and computed in float32"
    )
    out = v.new_empty(v.shape)
    call = _Call(
        *(None if x is None else x.data_ptr() for x in (*given, out, before, after)),
        *(*head, count, heads, q.shape[1], keys, values),
        1 if log_decay.dim() == 2 else keys,
    )
    kernels.function(name, ctypes.c_void_p, ctypes.c_int)(
        ctypes.addressof(call), torch.get_num_threads()
    )
    return out
