"""How many requests fit, how long they may be, and where an arena's bytes go.

Owns these questions, not their arithmetic: pages, slabs and bytes are those of ``cache/layout.py``
and ``memory/layout.py``, by
which requests are admitted. Knows layouts only: no model, no config, no units of display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from octavo.base import ConfigError, blocks_of, floor_to
from octavo.cache.layout import (
    CacheLayout,
    GroupLayout,
    ideal_bytes,
    lone_pages,
    pages_by_bucket,
    request_bytes,
    request_pages,
    slabs_needed,
)
from octavo.plan.report import BytesAt, Capacity, Mix, StepTransient, Waste


def pages_fit(layout: CacheLayout, pages_per_group: Sequence[int]) -> bool:
    """Whether so many pages of every group fit together: exact admission into an arena where
    nothing is pinned.
    """
    return slabs_needed(layout, pages_per_group) <= layout.arena.num_slabs


def requests_that_fit(layout: CacheLayout, n: int) -> int:
    """Requests of ``n`` tokens that the scheduler holds at once, admitted one after another."""
    if not pages_fit(layout, lone_pages(layout, n)):
        return 0
    pages = request_pages(layout, n)
    return _most(lambda count: pages_fit(layout, [count * each for each in pages]))


def mix_that_fits(layout: CacheLayout, shares: Mapping[int, float], *, replicas: int = 1) -> Mix:
    """Requests that fit into ``replicas`` arenas whose lengths are distributed as ``shares`` says;
    part of one counts as such.

    Raises ConfigError for a share that is not positive.
    """
    if not shares or min(shares.values()) <= 0 or min(shares) < 1:
        raise ConfigError(f"mix {dict(shares)} must give positive lengths with positive shares")
    total = sum(shares.values())
    normal = {length: share / total for length, share in shares.items()}
    if not pages_fit(layout, lone_pages(layout, max(normal))):
        return Mix(shares=normal, requests=0)
    charged = [
        [share * pages for pages in request_pages(layout, length)]
        for length, share in normal.items()
    ]
    mean = [sum(column) for column in zip(*charged, strict=True)]
    most = _most(lambda count: pages_fit(layout, [ceil(count * each) for each in mean]))
    return Mix(shares=normal, requests=replicas * most)


def longest_context(layout: CacheLayout, requests: int) -> int:
    """The longest ``n`` at which ``requests`` requests fit, at most the layout's ``max_model_len``;
    0 where none does.
    """
    if requests < 1:
        raise ConfigError(f"requests must be at least 1, not {requests}")

    def fits(n: int) -> bool:
        together = [requests * pages for pages in request_pages(layout, n)]
        return (
            n <= layout.max_model_len
            and pages_fit(layout, lone_pages(layout, n))
            and pages_fit(layout, together)
        )

    return _most(fits)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest count that fits; 0 always does, and what fits with more fits with fewer."""
    most = 1
    while fits(most):
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def capacity_at(layout: CacheLayout, n: int, *, memory: int, replicas: int) -> Capacity:
    """Planned and ideal number of requests of ``n`` tokens in ``replicas`` arenas of ``memory``
    bytes each.
    """
    ideal = memory / ideal_bytes(layout, n)
    return Capacity(
        tokens=n, requests=replicas * requests_that_fit(layout, n), ideal=replicas * ideal
    )


def bytes_at(layout: CacheLayout, n: int) -> BytesAt:
    """Bytes of one request of ``n`` tokens."""
    grown = sum(group.group.bytes_needed(n) for group in layout.groups if group.fixed is None)
    kept = sum(group.group.bytes_needed(n) for group in layout.groups if group.fixed is not None)
    return BytesAt(
        tokens=n,
        ideal=ideal_bytes(layout, n),
        growing=grown,
        bounded=kept,
        allocated=request_bytes(layout, n),
    )


def allocated_line(layout: CacheLayout) -> tuple[float, int]:
    """(arena bytes per token, arena bytes per request): what pages of growing groups and full rings
    cost.
    """
    unit = layout.arena.unit_bytes
    slope = sum(
        group.page_units * unit / group.block_tokens
        for group in layout.groups
        if group.fixed is None
    )
    return slope, sum(
        (group.fixed + group.turning) * group.page_units * unit
        for group in layout.groups
        if group.fixed is not None
    )


def waste_at(layout: CacheLayout, n: int, *, memory: int) -> Waste:
    """Where ``memory`` bytes go when as many requests of ``n`` tokens are held as fit."""
    arena, count, pages = layout.arena, requests_that_fit(layout, n), request_pages(layout, n)
    unit = arena.unit_bytes
    by_bucket = [count * each for each in pages_by_bucket(layout, pages)]
    slabs = [
        arena.slabs_for([each if b == bucket else 0 for b, each in enumerate(by_bucket)])
        for bucket in range(len(by_bucket))
    ]
    places = [used * arena.pages_per_slab(bucket) for bucket, used in enumerate(slabs)]
    entries = sum(
        each * _entry_bytes(group) for each, group in zip(pages, layout.groups, strict=True)
    )
    formats = sum(
        each * group.format.page_bytes for each, group in zip(pages, layout.groups, strict=True)
    )
    needed, slab_bytes = ideal_bytes(layout, n), arena.slab_units * unit
    return Waste(
        needed=count * needed,
        blocks=count * (entries - needed),
        alignment=count * (formats - entries),
        buckets=count * (request_bytes(layout, n) - formats),
        slab_tails=sum(
            used * (arena.slab_units % arena.page_units[bucket]) * unit
            for bucket, used in enumerate(slabs)
        ),
        open_slabs=sum(
            (have - used) * arena.page_units[b] * unit
            for b, (have, used) in enumerate(zip(places, by_bucket, strict=True))
        ),
        free_slabs=(arena.num_slabs - sum(slabs)) * slab_bytes,
        arena_tail=memory - arena.num_slabs * slab_bytes,
    )


def _entry_bytes(group: GroupLayout) -> int:
    """Bytes of the entries that one page holds, without alignment."""
    return sum(slot.entries * slot.field.entry_bytes for slot in group.format.slots)


def resume_point_bytes(layout: CacheLayout, n: int) -> int:
    """Arena bytes of the pages that a resume point at ``n`` tokens, floored to a hash unit, keeps
    for itself.
    """
    end, unit = floor_to(n, layout.hash_unit), layout.arena.unit_bytes
    return sum(
        len(blocks_of(group.group.law.needs(end), group.block_tokens)) * group.page_units * unit
        for group in layout.groups
        if group.fixed is not None
    )


def step_transient(layout: CacheLayout, chunk: int) -> StepTransient:
    """What a step may take on top, for prompt chunks of ``chunk`` tokens."""
    unit = layout.arena.unit_bytes
    rings = [group for group in layout.groups if group.fixed is not None]
    fresh: dict[int, int] = {}
    for member in (member for group in rings for member in group.group.members):
        law, stream = member.stream.law, member.stream
        # A state that replaces what it reads is one entry, however many tokens the chunk has.
        entries = 1 if law.reads_before_writing else chunk // stream.stride
        fresh[member.layer] = fresh.get(member.layer, 0) + entries * stream.entry_bytes
    return StepTransient(
        copies=sum(group.page_units * unit for group in layout.groups),
        checkpoint=sum(
            ((group.fixed or 0) + group.turning) * group.page_units * unit for group in rings
        ),
        chunk=chunk,
        fresh=max(fresh.values(), default=0),
    )
