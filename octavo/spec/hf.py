"""From a ``config.json`` to a ``ModelSpec``. Torch-free.

Owns reading config files, unfolding multimodal ones, and finding families and kinds (octavo's own
and plugins'). Knows no
particular family: it finds them by name at run time.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.base import ConfigError, UnsupportedError
from octavo.spec.family import Families, Family
from octavo.spec.kind import PLANNING, Config, Kind, ModelSpec, count
from octavo.spec.rope import longest_sequence

PLUGIN_GROUP = "octavo.plugins"
"""Entry point group. A plugin is a module with ``FAMILIES`` (tuple of Family) and ``KINDS`` (tuple
of Kind classes), or either.
"""

MAX_LAYERS = 10_000
"""Layers of a model beyond which a config is taken for broken, rather than filling memory with
them.
"""


def load_config(path: str | Path) -> dict[str, Any]:
    """The config of a model directory or of a ``config.json`` itself, as it stands in the file."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; give a model directory with a config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__}, not a JSON object")
    return config


def text_config(config: Config) -> Config:
    """The text model's part of a config; multimodal configs keep it under ``text_config``."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    # Only what the class would not put back to its own default is inherited from the outer level.
    outer = {
        key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config
    }
    return {**outer, **inner}


def find_families(plugins: Iterable[ModuleType | str] = ()) -> Families:
    """All families and kinds: octavo's own, installed plugins, and ``plugins`` (modules or module
    names).
    """
    own = list(_modules_of("octavo.models"))
    extra = [entry.load() for entry in entry_points(group=PLUGIN_GROUP)]
    extra += [
        importlib.import_module(plugin) if isinstance(plugin, str) else plugin for plugin in plugins
    ]
    families = [module.FAMILY for module in own if hasattr(module, "FAMILY")]
    families += [family for module in (*own, *extra) for family in getattr(module, "FAMILIES", ())]
    kinds: list[type[Kind]] = list(importlib.import_module("octavo.kinds").find_kinds())
    kinds += [kind for module in extra for kind in getattr(module, "KINDS", ())]
    return Families(tuple(families), tuple(kinds))


def _modules_of(package: str) -> Iterable[ModuleType]:
    root = importlib.import_module(package)
    for info in sorted(pkgutil.iter_modules(root.__path__), key=lambda info: info.name):
        yield importlib.import_module(f"{package}.{info.name}")


def family_of(config: Config, families: Families) -> Family:
    """The family that reads ``config``. Raises UnsupportedError naming the model_type or
    architecture.
    """
    text = text_config(config)
    model_type = text.get("model_type") or config.get("model_type")
    if not model_type:
        named = ", ".join(config.get("architectures") or ()) or "none"
        raise UnsupportedError(
            f"the config has no model_type (architectures: {named}); octavo reads models by"
            " model_type"
        )
    return families.for_model_type(model_type)


def read_spec(
    config: Config, *, families: Families | None = None, planning: bool = False
) -> ModelSpec:
    """Layers, kinds and options of the model a config describes.

    planning: read only what decides memory, also of models that octavo cannot run; the spec has no
    options then. Raises UnsupportedError naming the model_type, or the field that cannot be run,
    ConfigError naming a field that is wrong.
    """
    family = family_of(config, find_families() if families is None else families)
    text = text_config(config)
    if not planning:
        _check_runs(text, family)
    if isinstance(text.get("num_hidden_layers"), int) and text["num_hidden_layers"] > MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers {text['num_hidden_layers']} is beyond what octavo reads"
            f" ({MAX_LAYERS})"
        )
    normal = family.normalize({**text, PLANNING: planning})
    spec = ModelSpec(
        family=family.name,
        layers=family.layers(normal),
        vocab_size=count(normal, "vocab_size"),
        max_model_len=longest_sequence(text, normal),
        hash_unit=family.hash_unit(normal),
        options={} if planning else dict(family.options(normal)),
        assumed={
            name: value
            for name, value in family.defaults.items()
            if name not in text and type(value) is int
        },
        parameters=family.parameters(normal) if planning and family.parameters else None,
    )
    if not planning:
        _check_kinds_run(spec)
    return spec


def _check_runs(text: Config, family: Family) -> None:
    if family.module is None:
        raise UnsupportedError(
            f"model_type {text.get('model_type')!r} can be planned but not run yet"
        )
    if text.get("quantization_config"):
        method = text["quantization_config"].get("quant_method", "unknown")
        if method == "fp8":
            weight_block(text)
        elif method not in family.quantised:
            raise UnsupportedError(
                f"quantization_config (quant_method {method!r}) is not supported; give an"
                " unquantised checkpoint or a GGUF file"
            )


def weight_block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of fp8 weights that share a scale; DeepSeek's where nothing is fp8.

    Raises UnsupportedError where the config does not say.
    """
    quantised = text_config(config).get("quantization_config") or {}
    if quantised.get("quant_method") != "fp8":
        return 128, 128
    block = quantised.get("weight_block_size")
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or any(type(size) is not int or size < 1 for size in block)
    ):
        raise UnsupportedError(
            f"quantization_config.weight_block_size {block!r} is not supported; fp8 weights need"
            " scales of [rows, columns]"
        )
    return block[0], block[1]


def _check_kinds_run(spec: ModelSpec) -> None:
    for layer in spec.layers:
        for mixer, kind in layer.mixers:
            if kind.layer is None:
                raise UnsupportedError(
                    f"layer {layer.index} ({mixer}) is of kind {kind.name!r}, planned for but not"
                    " run yet"
                )
