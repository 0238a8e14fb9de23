"""What one device keeps where several share a model's heads.

Owns the cutting of streams for tensor parallelism: fields that split by heads are divided, the
others are replicated. Knows no kind; a field says itself how it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.base import ConfigError
from octavo.spec.group import Group, Member
from octavo.spec.stream import Field


def shard_groups(groups: Sequence[Group], tp: int) -> tuple[Group, ...]:
    """The groups of one of ``tp`` devices. Raises ConfigError where heads cannot be dealt out
    evenly.
    """
    if tp < 1:
        raise ConfigError(f"tp must be at least 1, not {tp}")
    return tuple(
        replace(group, members=tuple(_shard(member, tp) for member in group.members))
        for group in groups
    )


def _shard(member: Member, tp: int) -> Member:
    fields = tuple(_cut(field, member, tp) for field in member.stream.fields)
    return replace(member, stream=replace(member.stream, fields=fields))


def _cut(field: Field, member: Member, tp: int) -> Field:
    if field.shard != "heads":
        return field
    heads, *rest = field.shape
    if heads % tp and tp % heads:
        raise ConfigError(
            f"tp {tp} does not divide the {heads} heads of field {field.name} in layer"
            f" {member.layer}, nor they it; give a divisor of {heads}, or a multiple to replicate"
            " heads"
        )
    return replace(field, shape=(max(1, heads // tp), *rest))
