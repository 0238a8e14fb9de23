"""Causal depthwise convolution over the tokens of several requests, with the inputs that each
carries.

Owns the arithmetic only: no activation, no gate. A request's state is its last K - 1 inputs; zeros
before its first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops.ragged import Inputs, Kernel, Ragged, scan
from octavo.ops.states import State

_CHUNK = 1024


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, past: Sequence[State]) -> Tensor:
    """``ConvOp``."""
    before = [state.before() for state in past]
    joined = torch.cat([one.flatten(1, -2) for one in before], dim=1)
    y, kept = causal_conv(x, joined, weight, bias, past[0].ragged)
    sizes = [one.shape[1:-1].numel() for one in before]
    for state, part in zip(past, kept.split(sizes, dim=1), strict=True):
        state.store(part)
    return y


def causal_conv(
    x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """``y[t] = bias + sum_j weight[:, j] x[t - K + 1 + j]``, all in the dtype of ``x``.

    ``x`` [T, C], ``past`` [R, C, K-1] oldest first, ``weight`` [C, K], ``bias`` [C]. Returns ``y``
    [T, C] and the last K - 1 inputs after each emit point [E, C, K-1].
    """
    width = weight.shape[1]
    assert past.shape[1:] == (x.shape[1], width - 1), (
        f"carried inputs are {tuple(past.shape)} for a kernel of {width}"
    )
    taps = weight.to(x.dtype).T.contiguous()
    offset = torch.zeros_like(taps[0]) if bias is None else bias.to(x.dtype)

    def chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        line = torch.cat([state.T, inputs[0]])
        tokens = len(inputs[0])
        y = torch.addcmul(offset, line[:tokens], taps[0])
        for j in range(1, width):
            y.addcmul_(line[j : j + tokens], taps[j])
        return y, line[tokens:].T

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        line = torch.cat([state, inputs[0][..., None]], dim=-1)
        return (line * taps.T).sum(-1) + offset, line[..., 1:]

    kernel = Kernel(chunk=chunk, step=step, size=_CHUNK)
    return scan(kernel, (x,), past, ragged, out_shape=x.shape[1:], dtype=x.dtype)
