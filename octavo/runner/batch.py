"""From a step plan to tensors, once per step, so that layers run no Python per token.

Owns the choice of what is attended together. Knows laws (for what a step reads) and plans; knows no
kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from octavo.base import NO_PAGE, Interval, blocks_of
from octavo.kernels.attention import Reads
from octavo.nn.step import Step
from octavo.ops.paged import Closed, DecodeBucket, GroupBatch, Past, RequestRead, Writes
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.law import Law

BUCKET_FILL = 0.75
"""A decode joins a bucket while its own blocks are at least this share of the bucket's longest row.
"""

BUCKET_TOKENS = 1 << 16
"""Most gathered tokens of one bucket, so that one head's copy stays near the caches."""


def _tensor(values: np.ndarray | Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def make_step(plan: StepPlan, device: torch.device) -> Step:
    """What all layers share of a plan."""
    lengths = np.diff(plan.query_start)
    offsets = np.arange(plan.num_tokens) - np.repeat(plan.query_start[:-1], lengths)
    positions = np.repeat(plan.start, lengths) + offsets
    last = plan.query_start[1:][plan.samples] - 1
    return Step(
        token_ids=_tensor(plan.token_ids, device),
        positions=_tensor(positions, device),
        last=_tensor(last, device),
        cuts=plan.query_start.tolist(),
        starts=plan.start.tolist(),
    )


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


class PlannedGroup(GroupBatch):
    """One group's reads and writes as its step plan has them, each part made when a layer first
    asks for it.
    """

    def __init__(self, plan: StepPlan, group: GroupStep, law: Law, device: torch.device) -> None:
        self._plan, self._group, self._law, self._device = plan, group, law, device
        self.block_tokens = group.block_tokens
        lengths = np.diff(plan.query_start)
        self._fresh = np.asarray(group.fresh, dtype=bool)
        self._late = np.repeat(self._fresh, lengths)
        self._is_stored = np.asarray(group.write_page) != NO_PAGE
        # Laws that keep a prefix read from two places, which a bucket's one run of blocks cannot
        # say.
        self._together = (lengths == 1) & ~self._fresh & (not law.prefix)
        self._closed: dict[int, Closed] = {}

    @cached_property
    def table(self) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self._group.table).to(self._device)

    @cached_property
    def rows(self) -> Tensor:  # type: ignore[override]
        return _tensor(self._group.rows, self._device)

    @cached_property
    def before(self) -> Writes:
        return _writes(self._group, self._is_stored & ~self._late, self._device)

    @cached_property
    def after(self) -> Writes:
        return _writes(self._group, self._is_stored & self._late, self._device)

    @cached_property
    def stored(self) -> Writes:
        return _writes(self._group, self._is_stored, self._device)

    @cached_property
    def decodes(self) -> Sequence[DecodeBucket]:
        """Decodes without a prefix are bucketed, everything else is attended request by request."""
        return _decodes(
            self._plan, self._group, self._law, np.flatnonzero(self._together), self._device
        )

    @cached_property
    def requests(self) -> Sequence[RequestRead]:
        alone = np.flatnonzero(~self._together)
        return [_request(self._plan, self._group, self._law, int(i), self._device) for i in alone]

    @cached_property
    def past(self) -> Past:
        return _past(self._plan, self._group, self._law, self._device)

    @cached_property
    def reads(self) -> Reads:
        start = self._plan.start.astype(np.int64)
        lengths = np.diff(self._plan.query_start)
        offsets = np.arange(self._plan.num_tokens) - np.repeat(self._plan.query_start[:-1], lengths)
        return Reads(
            table=self.table,
            rows=self.rows,
            fixed=self._group.fixed,
            turning=self._group.turning,
            block_tokens=self.block_tokens,
            query_start=_tensor(self._plan.query_start, self._device),
            start=_tensor(start, self._device),
            fresh=torch.from_numpy(self._fresh).to(self._device),
            first=_tensor(self._law.first(np.repeat(start, lengths) + offsets), self._device),
            prefix=self._law.prefix,
        )

    def closed(self, stride: int) -> Closed:
        if stride not in self._closed:
            self._closed[stride] = _close(
                self._plan, self._group, stride, self._is_stored, self._device
            )
        return self._closed[stride]

    def locate(self, requests: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert self._law.prefix is None, (
            "only a law that lets nothing go has every block in a column of its own"
        )
        positions = positions.clamp(min=0)
        pages = self.table[self.rows[requests], positions // self.block_tokens]
        return pages.long(), positions % self.block_tokens


def _past(plan: StepPlan, group: GroupStep, law: Law, device: torch.device) -> Past:
    start = plan.start.astype(np.int64)
    front = start if law.prefix is None else np.minimum(law.prefix, start)
    low = np.clip(law.first(start), front, start)
    counts = front + start - low
    cuts = np.concatenate(([0], np.cumsum(counts)))
    places = np.arange(cuts[-1]) - np.repeat(cuts[:-1], counts)
    positions = places + np.repeat(low - front, counts) * (places >= np.repeat(front, counts))
    rows = np.repeat(np.asarray(group.rows), counts)
    pages = group.table[rows, columns(group, positions // group.block_tokens)]
    return Past(
        pages=_tensor(pages, device),
        rows=_tensor(positions % group.block_tokens, device),
        positions=_tensor(positions, device),
        cuts=cuts.tolist(),
    )


def _close(
    plan: StepPlan, group: GroupStep, stride: int, stored: np.ndarray, device: torch.device
) -> Closed:
    assert group.block_tokens % stride == 0, "blocks cut no entry"
    first, stop = plan.start.astype(np.int64) // stride, plan.stop.astype(np.int64) // stride
    counts = stop - first
    cuts = np.concatenate(([0], np.cumsum(counts)))
    numbers = np.arange(cuts[-1]) - np.repeat(cuts[:-1], counts) + np.repeat(first, counts)
    tokens = (
        (numbers + 1) * stride
        - 1
        - np.repeat(plan.start, counts)
        + np.repeat(plan.query_start[:-1], counts)
    )
    kept = np.flatnonzero(stored[tokens])
    return Closed(
        tokens=_tensor(tokens, device),
        numbers=_tensor(numbers, device),
        cuts=cuts.tolist(),
        writes=Writes(
            tokens=_tensor(kept, device),
            pages=_tensor(group.write_page[tokens[kept]], device),
            rows=_tensor(group.write_row[tokens[kept]] // stride, device),
        ),
    )


def _writes(group: GroupStep, chosen: np.ndarray, device: torch.device) -> Writes:
    tokens = np.flatnonzero(chosen)
    return Writes(
        tokens=_tensor(tokens, device),
        pages=_tensor(group.write_page[tokens], device),
        rows=_tensor(group.write_row[tokens], device),
    )


def _request(
    plan: StepPlan, group: GroupStep, law: Law, i: int, device: torch.device
) -> RequestRead:
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
    """Reads [first, stop) of many one-token requests, as arrays over them. which: their indices in
    the plan.
    """

    which: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    block: np.ndarray
    count: np.ndarray


def _decodes(
    plan: StepPlan, group: GroupStep, law: Law, which: np.ndarray, device: torch.device
) -> list[DecodeBucket]:
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
        found.append(
            _bucket(
                plan,
                group,
                _Decodes(which[cut], first[cut], stop[cut], block[cut], count[cut]),
                device,
            )
        )
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
