"""The torch layer of echo attention: the projections every attention has, and its own way of
mixing.

Owns its way of mixing. Sees pages only through the views it is handed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.attention import Attention
from octavo.nn.step import Caches, Step
from octavo.ops.attention import Rule, weights_of
from octavo.ops.paged import CacheView, RequestRead
from octavo.spec.law import SinkWindow
from tests.plugins.echo.spec import Echo


class EchoLayer(Attention):
    """Causal attention over the first ``kind.sinks`` tokens and the last ``kind.window``."""

    def __init__(self, kind: Echo, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(
            kind.attention, law=SinkWindow(kind.sinks, kind.window), dtype=dtype, device=device
        )
        self.kind = kind
        self.rule = Rule(law=self.law, scale=kind.attention.scale, softcap=kind.attention.softcap)

    def forward(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, d] -> [T, d]; stores the step's keys and values as the cache's batch says."""
        q, (k, v) = self.queries(hidden, step), self.keys_values(hidden, step)
        view = caches["kv"]
        batch = view.batch
        assert not batch.decodes, "a law that keeps a prefix is attended request by request"
        k, v = view.begin(k=k, v=v).values()
        out = torch.empty_like(q)
        for request in batch.requests:
            own = slice(*request.query)
            out[own] = self._attend(q[own], k[own], v[own], view, request)
        view.end()
        return self.o_proj(out.flatten(1))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: CacheView, request: RequestRead
    ) -> Tensor:
        """One request. q: [n, Hq, D]; k, v: [n, Hkv, D], its own, which are not in pages yet where
        ``fresh`` -> [n, Hq, D].
        """
        stop = request.start + q.shape[0]
        seen = (*request.intervals, (request.start, stop)) if request.fresh else request.intervals
        places = torch.cat([torch.arange(*interval, device=q.device) for interval in seen])
        queries = torch.arange(request.start, stop, device=q.device)[:, None]
        near = (places > queries - self.kind.window) & (places <= queries)
        hidden = ~(near | ((places < self.kind.sinks) & (places <= queries)))
        out = torch.empty_like(q)
        shared = q.shape[1] // k.shape[1]
        for head in range(k.shape[1]):
            mine = slice(head * shared, (head + 1) * shared)
            key, value = (
                request.gather_head(view.fields["k"], head),
                request.gather_head(view.fields["v"], head),
            )
            if request.fresh:
                key, value = torch.cat((key, k[:, head])), torch.cat((value, v[:, head]))
            weights = weights_of(q[:, mine].to(key.dtype) @ key.T, hidden[:, None], self.rule, mine)
            out[:, mine] = (weights.to(value.dtype) @ value).to(q.dtype)
        return out
