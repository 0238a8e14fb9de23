"""What a model family is: data that turns a ``config.json`` and a checkpoint's names into octavo's
own. Torch-free.

Owns ``Family``, ``GGUFRules`` and the immutable set ``Families``. Knows no particular family: those
live one file each in ``octavo/models/`` or in a plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.base import ConfigError, UnsupportedError
from octavo.spec.kind import Config, Kind, LayerSpec, ModelSpec

Rename = tuple[str, str]
"""(regular expression, replacement), applied to whole tensor names; the first that matches decides.
"""


def rename(name: str, rules: tuple[Rename, ...]) -> str | None:
    """``name`` by the first rule that matches all of it, or None where none does."""
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement)
    return None


@dataclass(frozen=True, kw_only=True)
class Repack:
    """How weights of the modules are filled from a checkpoint tensor that holds them in another
    arrangement.

    pattern: of the tensor's name, after ``Family.names``. into: the weights that it fills, in the
        syntax of replacements. Of several it holds the rows one behind the other; their sizes are
        those of the modules.
    index: in the same syntax, for one of a stack of weights: which along the stack's first axis.
        axis: where the rows are, in
        what ``index`` leaves of the weight. half: which half of the rows the tensor has, or None
        where it has them all.
    part: the tensor has rows of the first axis, behind ``part`` times as many, or, negative, that
        far from the end.
    transposed: the last two axes are exchanged. interleaved: rows of both halves alternate.
    """

    pattern: str
    into: tuple[str, ...]
    index: str = ""
    axis: int = 0
    half: int | None = None
    part: int | None = None
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class GGUFRules:
    """How llama.cpp's converter stores a family, and how to undo it.

    architecture: value of ``general.architecture``.
    config: (metadata without the architecture's prefix) -> config in upstream key names. Raises
        UnsupportedError by key.
    names: GGUF tensor name -> module name.
    unpermute: (module name pattern, config key of its head count) of weights whose rows the
        converter interleaved.
    minus_one: pattern of module names that are stored with 1 added.
    """

    architecture: str
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: tuple[Rename, ...]
    unpermute: tuple[tuple[str, str], ...] = ()
    minus_one: str | None = None


def _no_options(config: Config) -> Mapping[str, Any]:
    return {}


def _usual_unit(config: Config) -> int:
    return ModelSpec.hash_unit


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    model_types: values of ``model_type`` (of the text part) that it reads.
    normalize: config with the class defaults filled in and the family's quirks as explicit keys;
        refuses, unless it is for ``PLANNING``, what octavo cannot run with UnsupportedError naming
        the field.
    defaults: what the class takes where the file is silent, of what ``normalize`` fills in.
    layers, parameters, hash_unit: from the normalized config, the layer list, the number of weights
        of the text model, and the tokens of a hash unit.
    module: ``module:Class`` of the torch model: ``Class(spec, dtype=, device=)``. None: memory can
        be planned for the family,
        but it cannot be run, and what follows is empty. options: what ``module`` needs beyond the
        layers.
    names: checkpoint tensor name -> module name. ignored: patterns of checkpoint tensors that are
        not weights of the text
    model. repack: what of the rest is stored in another arrangement; the first rule that matches
    decides.
    drafts: pattern of module names whose group is a layer's number; behind the last one they are
        for drafting, and left out.
    quantised: values of ``quantization_config.quant_method``, beside fp8, whose weights are
        dequantised as they are read.
    """

    name: str
    model_types: tuple[str, ...]
    normalize: Callable[[Config], Config]
    layers: Callable[[Config], tuple[LayerSpec, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    parameters: Callable[[Config], int] | None = None
    hash_unit: Callable[[Config], int] = _usual_unit
    module: str | None = None
    options: Callable[[Config], Mapping[str, Any]] = _no_options
    names: tuple[Rename, ...] = ()
    ignored: tuple[str, ...] = ()
    repack: tuple[Repack, ...] = ()
    drafts: str | None = None
    quantised: tuple[str, ...] = ()
    gguf: GGUFRules | None = None

    def module_name(self, tensor: str) -> str | None:
        """Module name of a checkpoint tensor; None where it is to be ignored. A tensor no rule
        knows keeps its name.
        """
        if any(re.fullmatch(pattern, tensor) for pattern in self.ignored):
            return None
        return rename(tensor, self.names) or tensor


@dataclass(frozen=True)
class Families:
    """The families and kinds one process knows: built once, never changed."""

    families: tuple[Family, ...]
    kinds: tuple[type[Kind], ...] = field(default=())

    def __post_init__(self) -> None:
        for what, names in (
            (
                "model_type",
                [model_type for family in self.families for model_type in family.model_types],
            ),
            ("family", [family.name for family in self.families]),
            ("kind", [kind.name for kind in self.kinds]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(
                    f"{what} {', '.join(twice)} is defined more than once; remove one plugin"
                )

    def named(self, name: str) -> Family:
        """The family called ``name``. Raises UnsupportedError listing what is known."""
        for family in self.families:
            if family.name == name:
                return family
        raise UnsupportedError(
            f"family {name!r} is unknown; known: {', '.join(sorted(f.name for f in self.families))}"
        )

    def for_model_type(self, model_type: str) -> Family:
        """The family that reads ``model_type``. Raises UnsupportedError listing what is known."""
        for family in self.families:
            if model_type in family.model_types:
                return family
        known = sorted(known for family in self.families for known in family.model_types)
        raise UnsupportedError(
            f"model_type {model_type!r} is not supported: no family of octavo or a plugin says what"
            f" its layers remember; families know: {', '.join(known)}"
        )

    def for_gguf(self, architecture: str) -> tuple[Family, GGUFRules]:
        """The family that reads a GGUF architecture. Raises UnsupportedError listing what is
        known.
        """
        for family in self.families:
            if family.gguf is not None and family.gguf.architecture == architecture:
                return family, family.gguf
        known = sorted(f.gguf.architecture for f in self.families if f.gguf is not None)
        raise UnsupportedError(
            f"GGUF general.architecture {architecture!r} is not supported; supported:"
            f" {', '.join(known)}"
        )
