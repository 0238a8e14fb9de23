"""From a step plan to tensors, once per step, so that layers run no Python per token.

Owns the choice of what is attended together. Knows laws (for what a step reads) and plans; knows no kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.base import NO_PAGE, Interval, blocks_of
from octavo.nn.step import Step
from octavo.ops.paged import DecodeBucket, GroupBatch, RequestRead, Writes
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.law import Law

BUCKET_FILL = 0.75
"""A decode joins a bucket while its own blocks are at least this share of the bucket's longest row."""

BUCKET_TOKENS = 1 << 16
"""Most gathered tokens of one bucket, so that one head's copy stays near the caches."""


def _tensor(values: np.ndarray | Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def make_step(plan: StepPlan, device: torch.device) -> tuple[Tensor, Step]:
    """(token ids int64 [T], what all layers share) of a plan."""
    lengths = np.diff(plan.query_start)
    offsets = np.arange(plan.num_tokens) - np.repeat(plan.query_start[:-1], lengths)
    positions = np.repeat(plan.start, lengths) + offsets
    last = plan.query_start[1:][plan.samples] - 1
    return _tensor(plan.token_ids, device), Step(positions=_tensor(positions, device), last=_tensor(last, device))


def union(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """The same positions as ascending, disjoint intervals that do not touch."""
    merged: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def columns(group: GroupStep, blocks: np.ndarray) -> np.ndarray:
    """``group.column`` of many blocks."""
    if group.fixed is None:
        return blocks
    behind = group.fixed + (blocks - group.fixed) % max(group.turning, 1)
    return np.where(blocks < group.fixed, blocks, behind)


def make_group(plan: StepPlan, group: GroupStep, law: Law, device: torch.device) -> GroupBatch:
    """One group's reads and writes. Decodes without a prefix are bucketed, everything else is attended request by request."""
    lengths = np.diff(plan.query_start)
    fresh = np.asarray(group.fresh, dtype=bool)
    stored = np.asarray(group.write_page) != NO_PAGE
    late = np.repeat(fresh, lengths)
    # Laws that keep a prefix read from two places, which a bucket's one run of blocks cannot say.
    together = (lengths == 1) & ~fresh & (not law.prefix)
    return GroupBatch(
        before=_writes(group, stored & ~late, device),
        after=_writes(group, stored & late, device),
        decodes=_decodes(plan, group, law, np.flatnonzero(together), device),
        requests=[_request(plan, group, law, int(i), device) for i in np.flatnonzero(~together)],
    )


def _writes(group: GroupStep, chosen: np.ndarray, device: torch.device) -> Writes:
    tokens = np.flatnonzero(chosen)
    return Writes(
        tokens=_tensor(tokens, device),
        pages=_tensor(group.write_page[tokens], device),
        rows=_tensor(group.write_row[tokens], device),
    )


def _request(plan: StepPlan, group: GroupStep, law: Law, i: int, device: torch.device) -> RequestRead:
    start, stop, fresh = int(plan.start[i]), int(plan.stop[i]), bool(group.fresh[i])
    own = () if fresh else ((start, stop),)
    intervals = union((*law.needs(start), *own))
    blocks = np.asarray(blocks_of(intervals, group.block_tokens), dtype=np.int64)
    return RequestRead(
        query=(int(plan.query_start[i]), int(plan.query_start[i + 1])),
        start=start,
        fresh=fresh,
        intervals=intervals,
        block_tokens=group.block_tokens,
        pages=_tensor(group.table[group.rows[i], columns(group, blocks)], device),
    )


@dataclass(frozen=True, eq=False)
class _Decodes:
    """Reads [first, stop) of many one-token requests, as arrays over them. which: their indices in the plan."""

    which: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    block: np.ndarray
    count: np.ndarray


def _decodes(plan: StepPlan, group: GroupStep, law: Law, which: np.ndarray, device: torch.device) -> list[DecodeBucket]:
    if not which.size:
        return []
    start, size = plan.start[which].astype(np.int64), group.block_tokens
    first = np.maximum(law.first(start), 0)
    block = first // size
    count = -(-(start + 1) // size) - block
    order = np.argsort(-count, kind="stable")
    which, first, stop, block, count = (a[order] for a in (which, first, start + 1, block, count))
    found, low = [], 0
    while low < which.size:
        longest = int(count[low])
        fitting = int(np.searchsorted(-count, -BUCKET_FILL * longest, side="right"))
        high = min(fitting, low + max(1, BUCKET_TOKENS // (longest * size)))
        cut = slice(low, high)
        found.append(_bucket(plan, group, _Decodes(which[cut], first[cut], stop[cut], block[cut], count[cut]), device))
        low = high
    return found


def _bucket(plan: StepPlan, group: GroupStep, part: _Decodes, device: torch.device) -> DecodeBucket:
    size, longest = group.block_tokens, int(part.count[0])
    steps = np.arange(longest)
    blocks = part.block[:, None] + np.minimum(steps, part.count[:, None] - 1)
    pages = group.table[np.asarray(group.rows)[part.which][:, None], columns(group, blocks)]
    positions = part.block[:, None] * size + np.arange(longest * size)
    hidden = (positions < part.first[:, None]) | (positions >= part.stop[:, None])
    rows, places = np.nonzero(hidden)
    return DecodeBucket(
        tokens=_tensor(plan.query_start[:-1][part.which], device),
        pages=_tensor(pages, device),
        hidden=torch.from_numpy(hidden).to(device),
        hidden_page=_tensor(rows * longest + places // size, device),
        hidden_row=_tensor(places % size, device),
    )
