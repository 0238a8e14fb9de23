"""What layers with a state of constant size share: the state they begin with, and where states are wanted.

Owns the bridge between a stream of snapshots and the scans of ``ops``. Knows no kind and no formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.step import Step
from octavo.ops.paged import CacheView
from octavo.ops.ragged import Ragged


def carried(view: CacheView, step: Step) -> dict[str, Tensor]:
    """Each request's state after the tokens before its part, by field: [R, *entry], zeros where there are none."""
    past = view.past()
    if all(step.starts):
        return past
    known = torch.tensor([start > 0 for start in step.starts], device=step.positions.device)
    made = {}
    for name, found in past.items():
        made[name] = found.new_zeros(len(step.starts), *found.shape[1:])
        made[name][known] = found
    return made


def emits(view: CacheView, step: Step) -> Ragged:
    """The step's requests, and after which of their own tokens their state is stored."""
    return step.shared(("states wanted", id(view.batch)), lambda: _emits(view, step))


def _emits(view: CacheView, step: Step) -> Ragged:
    tokens = view.batch.stored.tokens.tolist()
    wanted: list[list[int]] = [[] for _ in step.starts]
    request = 0
    for token in tokens:
        while token >= step.cuts[request + 1]:
            request += 1
        wanted[request].append(token - step.cuts[request] + 1)
    return Ragged(starts=step.cuts, emits=wanted)
