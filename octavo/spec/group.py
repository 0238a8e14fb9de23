"""Streams that live and die together: groups, and the inside of their pages.

Owns how entries lie in a page: layer after layer, per layer field after field, per field head after
head. Knows laws and byte counts; knows no kinds, no arena and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from octavo.base import ConfigError, ceil_div, most_blocks, round_up
from octavo.spec.kind import ModelSpec
from octavo.spec.law import Law
from octavo.spec.stream import CacheDtypes, Field, Stream

FIELD_ALIGN = 64
"""Bytes a field's start in a page is aligned to: one cache line, and every vector load."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One stream of one layer, as part of a group. ``mixer`` is the module name of the stream's
    kind in its layer.
    """

    layer: int
    mixer: str
    stream: Stream


@dataclass(frozen=True, kw_only=True)
class FieldSlot:
    """Where one field of one member lies in a page: ``offset`` in bytes, ``entries`` entries, heads
    outermost.
    """

    member: Member
    field: Field
    offset: int
    entries: int


@dataclass(frozen=True, kw_only=True)
class PageFormat:
    """The inside of a page that holds ``block_tokens`` tokens of a group. ``page_bytes`` includes
    alignment padding.
    """

    block_tokens: int
    page_bytes: int
    slots: tuple[FieldSlot, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Streams with one law, in one table: a block of theirs is allocated, freed, indexed and moved
    as one page.
    """

    law: Law
    members: tuple[Member, ...]

    @property
    def stride(self) -> int:
        """Tokens that a block must be a multiple of, so that it holds whole entries of every
        member.
        """
        return lcm(*(member.stream.stride for member in self.members))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with a stream in this group, ascending, without repeats."""
        return tuple(sorted({member.layer for member in self.members}))

    def page_format(self, block_tokens: int) -> PageFormat:
        """Lay one block out. Raises ConfigError where a block would cut an entry."""
        if block_tokens < 1 or block_tokens % self.stride:
            raise ConfigError(
                f"block_tokens {block_tokens} must be a positive multiple of the group's stride"
                f" {self.stride}"
            )
        slots, offset = [], 0
        for member in self.members:
            for fld in member.stream.fields:
                entries = block_tokens // member.stream.stride
                slots.append(FieldSlot(member=member, field=fld, offset=offset, entries=entries))
                offset = round_up(offset + entries * fld.entry_bytes, FIELD_ALIGN)
        return PageFormat(block_tokens=block_tokens, page_bytes=offset, slots=tuple(slots))

    def bytes_needed(self, n: int) -> int:
        """Bytes of all members' entries in ``needs(n)``: the ideal, before blocks and padding."""
        return sum(member.stream.bytes_needed(n) for member in self.members)

    def table_columns(self, block_tokens: int) -> tuple[int | None, int]:
        """(blocks never let go, blocks that take turns behind them) of one request; None where all
        stay.

        The second number is what the law can ask for together with the token being written, at the
        worst alignment: the ring that steady decoding turns in without ever asking the pool.
        """
        if self.law.prefix is None:
            return None, 0
        return ceil_div(self.law.prefix, block_tokens), most_blocks(
            self.law.span, block_tokens, self.law.alignment
        )

    def split(self, parts: int) -> tuple[Group, ...]:
        """The same streams in ``parts`` groups of whole layers, for arenas in which one page would
        be too large.
        """
        layers = self.layers
        if not 1 <= parts <= len(layers):
            raise ConfigError(
                f"parts must be between 1 and the group's {len(layers)} layers, not {parts}"
            )
        cuts = [len(layers) * part // parts for part in range(parts + 1)]
        bundles = [set(layers[start:stop]) for start, stop in zip(cuts, cuts[1:], strict=False)]
        return tuple(
            Group(law=self.law, members=tuple(m for m in self.members if m.layer in bundle))
            for bundle in bundles
        )


def make_groups(spec: ModelSpec, dtypes: CacheDtypes | str) -> tuple[Group, ...]:
    """Collect a model's streams into groups by law, in order of first appearance. A single dtype is
    that of ``kv``.
    """
    if isinstance(dtypes, str):
        dtypes = CacheDtypes(kv=dtypes)
    by_law: dict[Law, list[Member]] = {}
    for layer in spec.layers:
        for mixer, kind in layer.mixers if layer.shares is None else ():
            for stream in kind.streams(dtypes):
                by_law.setdefault(stream.law, []).append(
                    Member(layer=layer.index, mixer=mixer, stream=stream)
                )
    return tuple(Group(law=law, members=tuple(members)) for law, members in by_law.items())
