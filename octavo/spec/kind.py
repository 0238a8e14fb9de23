"""The contract of a layer kind, and the layer list a family makes of it. Torch-free.

Owns ``Kind``, ``LayerSpec`` and ``ModelSpec``. Knows no particular kind: those live one folder each
in ``octavo/kinds/`` or in a plugin. A kind has six members: ``name``, ``from_hf``, ``streams``,
``layer``, ``reference``, ``examples``. When a seventh seems needed, ask which datum is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from octavo.base import ConfigError
from octavo.spec.stream import CacheDtypes, Stream

Config = Mapping[str, Any]
"""A ``config.json`` as a mapping, ``text_config`` already unfolded."""

PLANNING: Final = "octavo.planning"
"""Key that ``read_spec`` adds to a config: True where the spec is for planning memory only. What
concerns how a model computes (rotation, activation, scales) is then neither read nor refused.
"""


def count(config: Config, name: str, least: int = 1) -> int:
    """The whole number ``config[name]``. Raises ConfigError naming the field where it is missing,
    no number or too small.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """One way for a layer to mix tokens, with its parameters. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """Unique, lower case; the name of the kind's folder."""

    layer: ClassVar[str | None] = None
    """``module:Class`` of the torch layer: ``Class(kind, dtype, device)``; imported only when a
    model is built. None: the kind can be planned for, but not run.
    """

    reference: ClassVar[str | None] = None
    """``module:function`` of the slow dense oracle: whole sequence in, whole sequence out, no
    cache. None as ``layer``.
    """

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of layer ``index`` from a Hugging Face config. Raises UnsupportedError naming
        the field.
        """

    @abstractmethod
    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """What one layer of this kind remembers when its cache is kept in ``dtypes``."""

    @classmethod
    @abstractmethod
    def examples(cls) -> tuple[Self, ...]:
        """Small instances that the conformance suite runs, chosen to cross every border of the
        law.
        """


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a model.

    mixers: (module name in the checkpoint, kind) of everything in the layer that mixes tokens;
        empty for MLP-only layers.
    shares: index of the layer whose cache this one reads instead of keeping its own, or None.
    """

    index: int
    mixers: tuple[tuple[str, Kind], ...]
    shares: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What octavo knows of a model before any weight is read.

    hash_unit: tokens per prefix-cache hash: hit granularity, never a function of a state's size.
    parameters: weights of the text model, every expert counted; None where the family does not say,
        or outside planning.
    assumed: sizes that the file does not give, with the class defaults taken for them.
    options: what the family's torch module needs beyond the layers (norm placement, activation,
        scales).
    """

    family: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_model_len: int
    hash_unit: int = 16
    parameters: int | None = None
    assumed: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
