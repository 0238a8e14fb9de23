"""States of constant size in pages: what recurrences of ``ops`` read and store.

Owns ``State``, the bridge between a stream of snapshots and the scans. Knows no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.paged import CacheView, FieldView
from octavo.ops.ragged import Ragged
from octavo.ops.reads import Reads


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """One field of a stream of snapshots in one step: what every request begins with, and where its
    states are stored. An entry is the state behind a token, so that what a step reads and what it
    writes are different entries.
    """

    view: CacheView
    name: str

    @property
    def field(self) -> FieldView:
        """The field over the arena."""
        return self.view.fields[self.name]

    @property
    def ragged(self) -> Ragged:
        """The step's requests, and behind which of their own tokens their state is wanted."""
        return self.view.reads.once(ragged_of)

    def before(self) -> Tensor:
        """Each request's state after the tokens before its part: [R, *entry], zeros where there are
        none. To be called ahead of ``store``.
        """
        reads = self.view.reads
        found = self.field.take(reads.past.pages, reads.past.rows, self.view.ops)
        known = reads.once(known_requests)
        if known is None:
            return found
        made = found.new_zeros(reads.parts.num_requests, *found.shape[1:])
        made[known] = found
        return made

    def store(self, after: Tensor) -> None:
        """Store the wanted states, one row for each of ``reads.stored``: [W, *entry]."""
        writes, data = self.view.reads.stored, self.field.data
        assert after.shape[0] == writes.pages.shape[0], "one state for each that is wanted"
        if after.shape[0]:
            shape = (after.shape[0], data.shape[1], *data.shape[3:])
            rows = torch.arange(after.shape[0], device=data.device)
            made = after.to(data.dtype).reshape(shape)
            self.view.ops.store([data], writes.pages, writes.rows, [made], rows)


def known_requests(reads: Reads) -> Tensor | None:
    """bool [R], False for requests that have no state yet; None where all have one."""
    known = reads.parts.start > 0
    return None if known.all() else torch.from_numpy(known).to(reads.parts.device)


def ragged_of(reads: Reads) -> Ragged:
    """Which states a step stores, by request."""
    start_loc = reads.parts.entry_start_loc
    entries = reads.stored.entries.cpu().numpy()
    owners = np.searchsorted(start_loc, entries, side="right") - 1
    emits: list[list[int]] = [[] for _ in range(reads.parts.num_requests)]
    for owner, count in zip(
        owners.tolist(), (entries - start_loc[owners] + 1).tolist(), strict=True
    ):
        emits[owner].append(count)
    return Ragged(starts=start_loc.tolist(), emits=emits)


def states(view: CacheView, *names: str) -> Sequence[State]:
    """Several fields of one stream."""
    return [State(view=view, name=name) for name in names]
