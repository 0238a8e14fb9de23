"""Per layer: what it remembers, for how long, and which config fields decide that.

Owns the reading of those fields by watching which ones a kind asks for. Knows kinds by their contract only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import getdoc
from typing import Any

from octavo.plan.report import Decision, FieldPlan, LayerPlan, StreamPlan
from octavo.spec.group import Group, Member
from octavo.spec.kind import PLANNING, Config, Kind, LayerSpec, ModelSpec
from octavo.spec.stream import Stream


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


def plan_layers(spec: ModelSpec, groups: Sequence[Group], *, given: Config, normal: Config) -> tuple[LayerPlan, ...]:
    """Every layer of ``spec``; streams are those of ``groups``, which may be one device's share.

    given: the text part of the config as it stands in the file; normal: as its family reads it.
    """
    streams: dict[int, list[Member]] = {}
    for member in (member for group in groups for member in group.members):
        streams.setdefault(member.layer, []).append(member)
    lists = {name: value for name, value in normal.items() if _per_layer(value, len(spec.layers))}
    return tuple(
        LayerPlan(
            index=layer.index,
            kind="+".join(kind.name for _, kind in layer.mixers) or "none",
            about=about(layer),
            shares=layer.shares,
            streams=tuple(plan_stream(member.stream) for member in streams.get(layer.index, ())),
            decided_by=tuple(_decisions(layer, lists, given, normal)),
        )
        for layer in spec.layers
    )


def plan_stream(stream: Stream) -> StreamPlan:
    """A stream as the plan shows it."""
    return StreamPlan(
        name=stream.name,
        law=stream.law.describe(),
        grows=stream.law.prefix is None,
        stride=stream.stride,
        bytes_per_entry=stream.entry_bytes,
        fields=tuple(
            FieldPlan(name=field.name, shape=field.shape, dtype=field.dtype, split=field.shard == "heads")
            for field in stream.fields
        ),
    )


def about(layer: LayerSpec) -> str:
    """The first sentence of what its kinds say of themselves."""
    said = [(getdoc(type(kind)) or type(kind).name).split("\n\n")[0].replace("\n", " ") for _, kind in layer.mixers]
    return " ".join(said) or "Mixes no tokens, and remembers nothing."


def _per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) >= layers and all(isinstance(item, str | int) for item in value)


def _decisions(layer: LayerSpec, lists: Mapping[str, Any], given: Config, normal: Config) -> Iterator[Decision]:
    for name, value in lists.items():
        yield Decision(field=f"{name}[{layer.index}]", value=value[layer.index], given=name in given)
    seen = {PLANNING, *lists}
    for _, kind in layer.mixers:
        for name, value in _asked(kind, normal, layer.index).items():
            if name not in seen and isinstance(value, int | float | str | bool):
                seen.add(name)
                yield Decision(field=name, value=value, given=given.get(name) is not None)


def _asked(kind: Kind, normal: Config, index: int) -> dict[str, Any]:
    """Fields that the kind reads to become what it is; none where a family makes it in a way of its own."""
    watched = _Watched(normal)
    try:
        made = type(kind).from_hf(watched, index)
    except (KeyError, IndexError, ValueError):
        return {}
    return watched.asked if made == kind else {}
