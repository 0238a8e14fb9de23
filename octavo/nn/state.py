"""What layers with a state of constant size share: the state they begin with, and where states are
wanted.

Owns the bridge between a stream of snapshots and the scans of ``ops``. Knows no kind and no
formula.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from octavo.kernels.recurrent import Places, takes_pages
from octavo.nn.step import Step
from octavo.ops.paged import CacheView
from octavo.ops.ragged import Ragged


def carried(view: CacheView, step: Step, *, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Each request's state after the tokens before its part, by field: [R, *entry], zeros where
    there are none.
    """
    past = view.past(without=without)
    if all(step.starts):
        return past
    known = torch.tensor([start > 0 for start in step.starts], device=step.positions.device)
    made = {}
    for name, found in past.items():
        made[name] = found.new_zeros(len(step.starts), *found.shape[1:])
        made[name][known] = found
    return made


def in_pages(view: CacheView, step: Step, dtype: torch.dtype, name: str) -> Places | None:
    """Where the states of a field lie, if a compiled step can go from page to page: one token per
    request, of a layer that computes in no more than float32, and no page that one request writes
    is one that another still reads.
    """
    data = view.fields[name].data
    if dtype == torch.float64 or not takes_pages(data) or not emits(view, step).only_singles:
        return None
    found = step.shared(("states in pages", id(view.batch)), lambda: _in_pages(view, step))
    return None if found is None else Places(data=data, **found)


def _in_pages(view: CacheView, step: Step) -> dict[str, Tensor] | None:
    past, stored, device = view.batch.past, view.batch.stored, step.positions.device
    known = torch.tensor([start > 0 for start in step.starts], device=device)
    if past.pages.shape[0] != int(known.sum()):
        return None
    pages, rows = torch.zeros_like(stored.pages), torch.zeros_like(stored.rows)
    pages[known], rows[known] = past.pages, past.rows
    met = (stored.pages[:, None] == pages) & (stored.rows[:, None] == rows) & known
    if bool(met.fill_diagonal_(False).any()):
        return None
    return {
        "pages": pages,
        "rows": rows,
        "known": known,
        "to_pages": stored.pages,
        "to_rows": stored.rows,
    }


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
