"""The torch layer of echo attention: the projections every attention has, and its own way of
mixing.

Owns its way of mixing. Sees pages only through the views it is handed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.attention import Attention
from octavo.nn.step import Caches, Step
from octavo.ops.paged import CacheView
from octavo.spec.law import SinkWindow
from tests.plugins.echo.spec import Echo


class EchoLayer(Attention):
    """Causal attention over the first ``kind.sinks`` tokens and the last ``kind.window``."""

    def __init__(self, kind: Echo, dtype: torch.dtype, device: torch.device | str) -> None:
        law = SinkWindow(kind.sinks, kind.window)
        super().__init__(kind.attention, law=law, dtype=dtype, device=device)
        self.kind = kind

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's keys and values as the plan says."""
        q, (k, v) = self.queries(hidden, step), self.keys_values(hidden, step)
        view, out = caches["kv"], torch.empty_like(q)
        view.begin(k=k, v=v)
        for request in range(step.parts.num_requests):
            own = step.parts.queries_of(request)
            out[own] = self._mix(q[own], step.parts.queries[own], view, request)
        view.end()
        return self.o_proj(out.flatten(1))

    def _mix(self, q: Tensor, positions: Tensor, view: CacheView, request: int) -> Tensor:
        """One request's queries [n, Hq, D] at ``positions`` [n] -> [n, Hq, D]."""
        places, entry = view.seen(request, q.dtype)
        ahead = places > positions[:, None]
        near, opening = places > positions[:, None] - self.kind.window, places < self.kind.sinks
        hidden = ahead | ~(near | opening)
        shared = q.shape[1] // entry["k"].shape[1]
        k, v = (entry[part].repeat_interleave(shared, dim=1) for part in ("k", "v"))
        scores = torch.einsum("nhd,lhd->hnl", q, k) * self.params.scale
        if self.params.softcap is not None:
            scores = torch.tanh(scores / self.params.softcap) * self.params.softcap
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("hnl,lhd->nhd", weights, v)
