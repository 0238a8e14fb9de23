"""Selective state space models: Mamba-1's scan and Mamba-2's state space duality.

Owns the recurrences from discretised inputs on; convolution, softplus, the skip ``D x``, gate and norm are the caller's.
Sources: Gu and Dao 2023, "Mamba"; Dao and Gu 2024, "Transformers are SSMs".
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.linear import DECAYED
from octavo.ops.ragged import Ragged, scan, work_dtype


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """Mamba-2: ``h = exp(dt a) h + dt x b^T; y = h c``, in the block form of SSD.

    ``x`` [T, H, P], ``dt`` [T, H] > 0, ``a`` [H] < 0, ``b`` and ``c`` [T, G, N] (head j reads group j G // H), ``state``
    [R, H, P, N]. Returns ``y`` [T, H, P] and the states [E, H, P, N], both in float32, or float64 where anything given is.
    """
    dtype = work_dtype(x, dt, a, b, c, state)
    step = dt.to(dtype)
    inputs = (c, b, x.to(dtype) * step[..., None], step * a.to(dtype))
    return scan(DECAYED, inputs, state, ragged, out_shape=x.shape[1:], dtype=dtype)
