"""Per layer: what it remembers, for how long, and which config fields decide that.

Owns the finding of those fields: a kind is watched asking for them, and asked again with another
value. Knows kinds by their contract only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import getdoc
from typing import Any

from octavo.base import OctavoError
from octavo.cache.layout import resident_tokens
from octavo.plan.report import Decision, FieldPlan, LayerPlan, StreamPlan
from octavo.spec.group import Group, Member
from octavo.spec.kind import Config, Kind, LayerSpec, ModelSpec
from octavo.spec.stream import CacheDtypes, Stream


class _Watched(Mapping[str, Any]):
    """A config that notes which of its fields are asked for."""

    def __init__(self, config: Config) -> None:
        self._config, self.asked = config, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        value = self._config[name]
        self.asked[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def plan_layers(
    spec: ModelSpec,
    groups: Sequence[Group],
    context: int,
    *,
    given: Config,
    normal: Config,
    dtypes: CacheDtypes,
) -> tuple[LayerPlan, ...]:
    """Every layer of ``spec``; streams are those of ``groups``, which may be one device's share.

    context: tokens after which entries are counted. given: the text part of the config as it stands
    in the file; normal: as its family reads it.
    """
    streams: dict[int, list[Member]] = {}
    for member in (member for group in groups for member in group.members):
        streams.setdefault(member.layer, []).append(member)
    lists = {name: value for name, value in normal.items() if _per_layer(value, len(spec.layers))}
    first_of = {kind: layer.index for layer in reversed(spec.layers) for _, kind in layer.mixers}
    fields = {kind: _deciding(kind, normal, index, dtypes) for kind, index in first_of.items()}

    def decisions(layer: LayerSpec) -> Iterator[Decision]:
        for name, value in lists.items():
            yield Decision(
                field=f"{name}[{layer.index}]", value=value[layer.index], given=name in given
            )
        names = dict.fromkeys(
            name for _, kind in layer.mixers for name in fields[kind] if name not in lists
        )
        for name in names:
            said = given.get(name) is not None or spec.assumed.get(name) != normal[name]
            yield Decision(field=name, value=normal[name], given=said)

    return tuple(
        LayerPlan(
            index=layer.index,
            kind="+".join(kind.name for _, kind in layer.mixers) or "none",
            about=about(layer),
            shares=layer.shares,
            streams=tuple(
                plan_stream(member.stream, context) for member in streams.get(layer.index, ())
            ),
            decided_by=tuple(decisions(layer)),
        )
        for layer in spec.layers
    )


def plan_stream(stream: Stream, context: int) -> StreamPlan:
    """A stream as the plan shows it."""
    return StreamPlan(
        name=stream.name,
        law=stream.law.describe(),
        grows=stream.law.prefix is None,
        state=stream.law.reads_before_writing,
        stride=stream.stride,
        bytes_per_entry=stream.entry_bytes,
        entries=stream.bytes_needed(context) // stream.entry_bytes,
        entries_at_most=None
        if stream.law.prefix is None
        else resident_tokens(stream.law) // stream.stride,
        fields=tuple(
            FieldPlan(
                name=field.name, shape=field.shape, dtype=field.dtype, split=field.shard == "heads"
            )
            for field in stream.fields
        ),
    )


def about(layer: LayerSpec) -> str:
    """The first sentence of what its kinds say of themselves."""
    said = [
        (getdoc(type(kind)) or type(kind).name).split("\n\n")[0].replace("\n", " ")
        for _, kind in layer.mixers
    ]
    return " ".join(said).replace("``", "") or "Mixes no tokens, and remembers nothing."


def _per_layer(value: Any, layers: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) >= layers
        and all(isinstance(item, str | int) for item in value)
    )


def _deciding(kind: Kind, normal: Config, index: int, dtypes: CacheDtypes) -> tuple[str, ...]:
    """Numbers in the config that would change what the layer remembers if they were twice as large.

    Only those that the kind asks for are tried; none where its family makes it in a way of its own.
    """
    watched = _Watched(normal)
    if _streams(type(kind), watched, index, dtypes) != kind.streams(dtypes):
        return ()
    numbers = [
        name
        for name, value in watched.asked.items()
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    return tuple(
        name
        for name in numbers
        if _streams(type(kind), {**normal, name: 2 * normal[name]}, index, dtypes)
        != kind.streams(dtypes)
    )


def _streams(
    kind: type[Kind], config: Config, index: int, dtypes: CacheDtypes
) -> tuple[Stream, ...]:
    """What a layer would remember under a config; nothing where the kind refuses it."""
    try:
        return kind.from_hf(config, index).streams(dtypes)
    except (OctavoError, KeyError, IndexError):
        return ()
