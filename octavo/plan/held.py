"""What one request holds of a cache, by kind of memory instead of by group.

Owns the division of the allocator's pages among the streams that lie in them. Knows specs, layouts
and reports; whatever is shown is called by its stream and the kinds that keep it, so a new kind
needs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.layout import CacheLayout
from octavo.cache.report import CacheReport
from octavo.spec.group import Member
from octavo.spec.kind import ModelSpec

PADDING = "padding"
"""Name of what pages hold beside entries."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Streams that are alike, in all their layers together.

    kinds: of the layers that keep them. law: how long. dtypes: of their fields. stride: tokens per
        entry. entries: of one
    layer, those that the next token may need. bytes: their part of the pages held, entries that are
    no longer or not yet needed
    included. share: of all bytes held.
    """

    stream: str
    kinds: tuple[str, ...]
    law: str
    dtypes: tuple[str, ...]
    stride: int
    layers: tuple[int, ...]
    entries: int
    bytes: int
    share: float


def held_by_kind(spec: ModelSpec, layout: CacheLayout, report: CacheReport) -> tuple[Held, ...]:
    """The report's bytes divided among streams that are alike, in order of first appearance; what
    pads pages comes last.

    The parts add up to ``report.bytes``.
    """
    found: dict[object, list[tuple[Member, int]]] = {}
    for group, held in zip(layout.groups, report.groups, strict=True):
        sizes: dict[tuple[int, str, str], int] = {}
        for slot in group.format.slots:
            key = (slot.member.layer, slot.member.mixer, slot.member.stream.name)
            sizes[key] = sizes.get(key, 0) + slot.entries * slot.field.entry_bytes
        for member in group.group.members:
            size = sizes[member.layer, member.mixer, member.stream.name] * held.blocks
            found.setdefault(member.stream, []).append((member, size))
    made = [_held(spec, report, parts) for parts in found.values()]
    rest = report.bytes - sum(each.bytes for each in made)
    padding = Held(
        stream=PADDING,
        kinds=(),
        law="",
        dtypes=(),
        stride=1,
        layers=(),
        entries=0,
        bytes=rest,
        share=_share(rest, report),
    )
    return (*made, padding)


def _held(spec: ModelSpec, report: CacheReport, parts: Sequence[tuple[Member, int]]) -> Held:
    stream, size = parts[0][0].stream, sum(size for _, size in parts)
    kinds = (dict(spec.layers[member.layer].mixers)[member.mixer].name for member, _ in parts)
    return Held(
        stream=stream.name,
        kinds=tuple(dict.fromkeys(kinds)),
        law=stream.law.describe(),
        dtypes=tuple(dict.fromkeys(field.dtype for field in stream.fields)),
        stride=stream.stride,
        layers=tuple(member.layer for member, _ in parts),
        entries=sum((stop - start) // stream.stride for start, stop in stream.needs(report.tokens)),
        bytes=size,
        share=_share(size, report),
    )


def _share(size: int, report: CacheReport) -> float:
    return size / report.bytes if report.bytes else 0.0
