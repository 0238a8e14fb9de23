"""Naive paged attention, token by token, straight from the plan's own tables: what
``ops/attention.py`` is tested against.

Owns nothing the engine runs. Shares no code with the fast path: it walks the table and the write
lists of a ``GroupStep`` itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.paged import FieldView
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.law import Law


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fields: tuple[FieldView, FieldView],
    plan: StepPlan,
    group: GroupStep,
    *,
    law: Law,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same as ``ops.attention.attend`` in float64: [T, Hq, D], and the same writes. One loop
    per token, head and key.
    """
    out = torch.empty(q.shape, dtype=torch.float64)
    owner = [
        i
        for i in range(len(plan.request_ids))
        for _ in range(plan.query_start[i], plan.query_start[i + 1])
    ]
    _write(k, v, fields, group, [t for t, i in enumerate(owner) if not group.fresh[i]])
    for token, i in enumerate(owner):
        position = int(plan.start[i] + token - plan.query_start[i])
        seen = [p for start, stop in law.needs(position) for p in range(start, stop)]
        pairs = [_entry(k, v, fields, plan, group, i, p) for p in (*seen, position)]
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            scores = torch.stack(
                [(q[token, head].double() * key[shared].double()).sum() * scale for key, _ in pairs]
            )
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            total = (
                weights.sum()
                if sinks is None
                else weights.sum() + torch.exp(sinks[head].double() - scores.max())
            )
            out[token, head] = sum(
                (
                    w / total * value[shared].double()
                    for w, (_, value) in zip(weights, pairs, strict=True)
                ),
                start=0.0,
            )
    _write(k, v, fields, group, [t for t, i in enumerate(owner) if group.fresh[i]])
    return out


def _entry(
    k: Tensor,
    v: Tensor,
    fields: tuple[FieldView, FieldView],
    plan: StepPlan,
    group: GroupStep,
    request: int,
    position: int,
) -> tuple[Tensor, Tensor]:
    """Key and value [Hkv, D] that ``request`` sees at ``position``."""
    if group.fresh[request] and position >= plan.start[request]:
        token = int(plan.query_start[request] + position - plan.start[request])
        return k[token], v[token]
    column = group.column(position // group.block_tokens)
    page, row = int(group.table[group.rows[request], column]), position % group.block_tokens
    return fields[0].data[page, :, row], fields[1].data[page, :, row]


def _write(
    k: Tensor,
    v: Tensor,
    fields: tuple[FieldView, FieldView],
    group: GroupStep,
    tokens: Iterable[int],
) -> None:
    for token in tokens:
        page, row = int(group.write_page[token]), int(group.write_row[token])
        if page >= 0:
            fields[0].data[page, :, row] = k[token].to(fields[0].data.dtype)
            fields[1].data[page, :, row] = v[token].to(fields[1].data.dtype)
