"""Rotary position embedding as a config describes it. Torch-free.

Owns ``RopeParams`` and the reading of all spellings of ``rope_theta`` / ``rope_scaling`` /
``rope_parameters``. Knows no
tensors: ``nn/rope.py`` turns the parameters into frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from octavo.base import UnsupportedError
from octavo.spec.kind import Config, count

NEEDED: Final = {
    "default": (),
    "linear": ("factor",),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Keys that each supported ``rope_type`` cannot do without."""

ORIGINAL: Final = "original_max_position_embeddings"

_KNOWN: Final = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


@dataclass(frozen=True, kw_only=True)
class RopeParams:
    """One set of rotary frequencies, in the words of Transformers' ``rope_parameters``.

    attention_factor: None means YaRN's own value. partial_rotary_factor: the share of each head,
        from its front, that is
    rotated. interleaved: neighbours are rotated against each other, not halves. Layers with equal
    parameters share one cos/sin table per step.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """How many elements of a head have tables; in ``proportional`` ones the rest of the waves
        never turns.
        """
        return (
            head_dim
            if self.rope_type == "proportional"
            else int(head_dim * self.partial_rotary_factor)
        )


LIMIT_IS_SCALED: Final = "limit_is_scaled"
"""Key of a normalized config whose ``max_position_embeddings`` counts what its scaling adds."""


def longest_sequence(given: Config, normal: Config) -> int:
    """Tokens of the longest sequence that a config describes. given: as the file has it. normal: as
    the family reads it.

    ``max_position_embeddings`` is what the model was trained with, or what its scaling makes of
    that. YaRN names the former beside it, so the larger of the two is meant, and model cards add
    YaRN without touching the limit. For linear and dynamic scaling Transformers asks to leave the
    limit alone: the factor counts. The other scalings (llama3, longrope) come with a limit that
    has them in it.
    """
    limit = count(normal, "max_position_embeddings")
    for scaling in _scalings(given):
        rope_type, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
        if not isinstance(factor, int | float) or not 1 <= factor < inf:
            continue
        trained = scaling.get("original_max_position_embeddings")
        if rope_type == "yarn" or (rope_type in ("linear", "dynamic") and trained is not None):
            trained = limit if trained is None else count(scaling, ORIGINAL)
            limit = max(limit, int(trained * factor))
        elif rope_type in ("linear", "dynamic") and not normal.get(LIMIT_IS_SCALED):
            limit = int(limit * factor)
    return limit


def _scalings(given: Config) -> list[Mapping[str, Any]]:
    """What a config scales rotary frequencies by: one for all layers, or those of layer types."""
    said = given.get("rope_parameters") or given.get("rope_scaling")
    if not isinstance(said, Mapping):
        return []
    inner = [each for each in said.values() if isinstance(each, Mapping)]
    return inner if inner and not {"rope_type", "type"} & set(said) else [said]


def read_rope(
    config: Config, layer_type: str, *, where: str = "rope_parameters"
) -> RopeParams | None:
    """Rotary parameters of layers of ``layer_type``.

    ``config["rope_parameters"]`` is either one mapping for all layers or, as in Gemma 3, one per
    layer type; there a family puts None where nothing is rotated. Older configs have ``rope_theta``
    and ``rope_scaling`` instead. A family whose heads may be rotated in part sets
    ``partial_rotary``, one that rotates neighbours ``interleaved_rotary``. Raises UnsupportedError
    naming the field.
    """
    given = config.get("rope_parameters")
    if given and layer_type in given:
        given, where = given[layer_type], f"{where}.{layer_type}"
        if given is None:
            return None
    elif not given:
        given, where = config.get("rope_scaling") or {}, "rope_scaling"
    merged = {"rope_theta": config.get("rope_theta", 10000.0), **given}
    return _parse(merged, where, config)


def _parse(given: Mapping[str, Any], where: str, config: Config) -> RopeParams:
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in NEEDED:
        raise UnsupportedError(
            f"{where}.rope_type {rope_type!r} is not supported; supported: {', '.join(NEEDED)}"
        )
    unknown = sorted(key for key in given if key not in _KNOWN)
    if unknown:
        raise UnsupportedError(f"{where}.{unknown[0]} is not supported")
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (1, None) and not (config.get("partial_rotary") or rope_type == "proportional"):
        raise UnsupportedError(
            f"{where}.partial_rotary_factor {part} is not supported; only 1.0 is"
        )
    if rope_type != "default" and given.get("original_max_position_embeddings") is None:
        # Transformers falls back to the model's own length for both scalings that need one.
        given = {**given, "original_max_position_embeddings": config.get("max_position_embeddings")}
    missing = [key for key in NEEDED[rope_type] if given.get(key) is None]
    if missing:
        raise UnsupportedError(f"{where}.{missing[0]} is missing; rope_type {rope_type!r} needs it")
    params = RopeParams(
        theta=float(given["rope_theta"]),
        rope_type=rope_type,
        partial_rotary_factor=1.0 if part is None else float(part),
        interleaved=bool(config.get("interleaved_rotary", False)),
    )
    if rope_type == "default":
        return params
    fields = {
        key: given[key]
        for key in given
        if key in _KNOWN - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    }
    return replace(params, **{key: value for key, value in fields.items() if value is not None})
