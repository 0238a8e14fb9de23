"""Single steps of recurrent states by compiled kernels, where possible from page to page. Owns what
these take; chunks are plain PyTorch's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import recurrent as kernels
from octavo.kernels.recurrent import Places
from octavo.ops.ragged import Inputs
from octavo.ops.reads import Reads, on_device
from octavo.ops.states import State
from octavo.ops.torch import delta, linear, ssm


def decayed_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """``linear.decayed_step``."""
    if not _suits(state):
        return linear.decayed_step(inputs, state)
    q, k, v, log_decay = inputs
    return kernels.decayed_step(q, k, v, log_decay, state)


def delta_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """``delta.delta_step``."""
    if not _suits(state):
        return delta.delta_step(inputs, state)
    q, k, v, log_decay, beta = inputs
    return kernels.delta_step(q, k, v, log_decay, beta, state)


def _suits(state: Tensor) -> bool:
    """float32, a request's heads one after another."""
    return state.dtype == torch.float32 and len(state) > 0 and state[0].is_contiguous()


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: State) -> Tensor:
    """``SsdScanOp``."""
    places = _in_pages(state)
    if places is None:
        return ssm.ssd_scan(x, dt, a, b, c, state, decayed_step)
    x, dt = x.float(), dt.float()
    return kernels.decayed_step_in_pages(
        c.float(), b.float(), x * dt[..., None], dt * a.float(), places
    )


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: State
) -> Tensor:
    """``DeltaScanOp``."""
    places = _in_pages(state)
    if places is None:
        return delta.scanned(q, k, v, log_decay, beta, state, delta_step)
    return kernels.delta_step_in_pages(
        q.float(), k.float(), v.float(), log_decay.float(), beta.float(), places
    )


def decayed_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: State) -> Tensor:
    """``DecayedScanOp``."""
    return linear.decayed_scan(q, k, v, log_decay, state, decayed_step)


def feature_scan(q: Tensor, k: Tensor, v: Tensor, sums: State, keys: State) -> Tensor:
    """``FeatureScanOp``."""
    return linear.feature_scan(q, k, v, sums, keys, decayed_step)


def _in_pages(state: State) -> Places | None:
    """Where the states of a field lie, if a step can go from page to page: one token per request,
    and no page that one request writes is one that another still reads.
    """
    data = state.field.data
    if data.dtype != torch.float32 or data.dim() != 5 or not state.ragged.only_singles:
        return None
    if data.stride(4) != 1 or data.stride(3) != data.shape[4]:
        return None
    found = state.view.reads.once(_places)
    return None if found is None else Places(data=data, **found)


def _places(reads: Reads) -> dict[str, Tensor] | None:
    parts, device = reads.parts, reads.parts.device
    known = parts.start > 0
    pages, rows = np.zeros_like(parts.start), np.zeros_like(parts.start)
    mine = np.flatnonzero(known)
    pages[mine], rows[mine] = reads.find(mine, parts.start[mine] - 1)
    met = (reads.pages[:, None] == pages) & (reads.page_rows[:, None] == rows) & known
    np.fill_diagonal(met, False)
    if met.any():
        return None
    return {
        "pages": on_device(pages, device),
        "rows": on_device(rows, device),
        "known": torch.from_numpy(known).to(device),
        "to_pages": on_device(reads.pages, device),
        "to_rows": on_device(reads.page_rows, device),
    }
