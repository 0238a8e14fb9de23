"""The contract of a layer kind, and the layer list a family makes of it. Torch-free.

Owns ``Kind``, ``LayerSpec`` and ``ModelSpec``. Knows no particular kind: those live one folder each in
``octavo/kinds/`` or in a plugin. A kind has six members: ``name``, ``from_hf``, ``streams``, ``layer``, ``reference``,
``examples``. When a seventh seems needed, ask which datum is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from octavo.spec.stream import CacheDtypes, Stream

Config = Mapping[str, Any]
"""A ``config.json`` as a mapping, ``text_config`` already unfolded."""


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """One way for a layer to mix tokens, with its parameters. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """Unique, lower case; the name of the kind's folder."""

    layer: ClassVar[str]
    """``module:Class`` of the torch layer: ``Class(kind, dtype, device)``; imported only when a model is built."""

    reference: ClassVar[str]
    """``module:function`` of the slow dense oracle: whole sequence in, whole sequence out, no cache."""

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of layer ``index`` from a Hugging Face config. Raises UnsupportedError naming the field."""

    @abstractmethod
    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """What one layer of this kind remembers when its cache is kept in ``dtypes``."""

    @classmethod
    @abstractmethod
    def examples(cls) -> tuple[Self, ...]:
        """Small instances that the conformance suite runs, chosen to cross every border of the law."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a model.

    mixers: (module name in the checkpoint, kind) of everything in the layer that mixes tokens; empty for MLP-only layers.
    shares: index of the layer whose cache this one reads instead of keeping its own, or None.
    """

    index: int
    mixers: tuple[tuple[str, Kind], ...]
    shares: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What octavo knows of a model before any weight is read.

    hash_unit: tokens per prefix-cache hash: hit granularity, never a function of a state's size.
    options: what the family's torch module needs beyond the layers (norm placement, activation, scales).
    """

    family: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_model_len: int
    hash_unit: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
