"""The stream of layers whose memory has one size however long the text: past inputs of a short
convolution, and a state.

Owns how both lie in one entry. Knows no kind and no formula.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.base import ConfigError
from octavo.spec.kind import Config, count
from octavo.spec.law import Snapshot
from octavo.spec.stream import CacheDtypes, Field, Stream

Shape = tuple[int, ...]


def read_kernel(config: Config, name: str) -> int:
    """Columns of a causal convolution. Raises ConfigError below 2, where nothing would be
    remembered.
    """
    return count(config, name, 2)


def state_stream(
    dtypes: CacheDtypes,
    *,
    conv: Mapping[str, Shape],
    kernel: int = 1,
    recurrent: Shape | None = None,
) -> Stream:
    """One entry: the ``kernel - 1`` newest inputs of each convolution, and the recurrent state.
    First axes are heads.

    conv: field name -> channels, cut into heads. What the convolutions take is an activation and
    kept as such; the state sums over the whole text and has a dtype of its own.
    """
    fields = [
        Field(name=name, shape=(*shape, kernel - 1), dtype=dtypes.conv_inputs, shard="heads")
        for name, shape in conv.items()
    ]
    if recurrent is not None:
        fields.append(Field(name="recurrent", shape=recurrent, dtype=dtypes.state, shard="heads"))
    return Stream(name="state", law=Snapshot(), fields=tuple(fields))


def check_multiple(value: int, of: int, names: tuple[str, str]) -> None:
    """Raise ConfigError where heads do not divide evenly among groups."""
    if value % of:
        raise ConfigError(f"{names[0]} {value} is not a multiple of {names[1]} {of}")
