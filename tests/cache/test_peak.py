"""No in-flight waste: a windowed layer never holds what its law does not ask, not even in the
middle of a prefill.
"""

from __future__ import annotations

import pytest

from octavo.cache.layout import ideal_bytes, request_pages
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan
from tests.cache.drive import gemma_layout, make_request, run


def held_pages(scheduler: Scheduler) -> list[int]:
    """Pages per bucket that the pool itself counts as held or in flight."""
    pool, layout = scheduler.cache.coordinator.pool, scheduler.cache.layout
    counts = [pool.counts(group.bucket) for group in layout.groups]
    return [count.held + count.limbo for count in counts]


@pytest.mark.parametrize("chunk", [512, 1000, 2048, 8192])
@pytest.mark.parametrize("caching", [False, True])
def test_a_long_chunked_prefill_holds_needs_and_one_block_per_group(
    chunk: int, caching: bool
) -> None:
    layout = gemma_layout()
    assert len({group.bucket for group in layout.groups}) == 2, "the counters below are per group"
    scheduler = Scheduler(
        layout, max_num_batched_tokens=chunk, max_num_seqs=2, enable_prefix_caching=caching
    )
    scheduler.add(make_request("long", list(range(16_384)), max_tokens=600))
    peak = [0, 0]

    def look(plan: StepPlan) -> None:
        held = held_pages(scheduler)
        needs = request_pages(layout, int(plan.stop[0]))
        # Itemised: what the one checkpoint (the replay boundary) keeps, until its last page has
        # left the ring.
        replay = 16_384 - 16
        kept = needs[0] if caching and plan.stop[0] > replay else 0
        for index, extra in ((0, kept), (1, 0)):
            assert held[index] <= needs[index] + 1 + extra, (plan.start, plan.stop, held, needs)
        peak[:] = [max(pair) for pair in zip(peak, held, strict=True)]

    run(scheduler, look=look)
    unit = layout.arena.unit_bytes
    bytes_held = sum(
        pages * group.page_units * unit for pages, group in zip(peak, layout.groups, strict=True)
    )
    block_each = sum(group.page_units * unit for group in layout.groups)
    transient = (
        request_pages(layout, 16_384)[0] * layout.groups[0].page_units * unit if caching else 0
    )
    assert bytes_held <= 1.03 * ideal_bytes(layout, 16_984) + block_each + transient


def test_without_checkpoints_prefill_never_leaves_its_ring() -> None:
    layout = gemma_layout()
    scheduler = Scheduler(
        layout, max_num_batched_tokens=2048, max_num_seqs=1, enable_prefix_caching=False
    )
    scheduler.add(make_request("long", list(range(16_384)), max_tokens=1))
    peak = 0

    def look(plan: StepPlan) -> None:
        nonlocal peak
        peak = max(peak, held_pages(scheduler)[0])

    run(scheduler, look=look)
    assert 0 < peak <= layout.groups[0].turning
