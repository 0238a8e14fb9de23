"""Checkpoint tensors that hold weights in another arrangement than the modules: fused, one expert
at a time, transposed.

Owns carrying out a family's ``Repack`` rules. Knows shapes and names; knows no model and no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.base import ConfigError, Interval
from octavo.spec.family import Repack


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Values of one weight. region: where they belong, intervals of its leading axes; empty for all
    of it.
    """

    weight: str
    region: tuple[Interval, ...]
    values: Tensor


def pieces(
    name: str, tensor: Tensor, rules: Iterable[Repack], shapes: Mapping[str, torch.Size]
) -> list[Piece]:
    """What a tensor fills, by the first rule for its name, else the weight of its own name.

    shapes: of all weights of the model; a weight that is not among them comes back with the tensor
    as it is. Raises ConfigError where a tensor does not have as many rows as the weights it fills.
    """
    for rule in rules:
        match = re.fullmatch(rule.pattern, name)
        if match:
            into = [match.expand(weight) for weight in rule.into]
            unknown = [
                Piece(weight=weight, region=(), values=tensor)
                for weight in into
                if weight not in shapes
            ]
            return unknown or _repacked(
                name, tensor, rule, [(weight, shapes[weight]) for weight in into], match
            )
    return [Piece(weight=name, region=(), values=tensor)]


def _repacked(
    name: str,
    tensor: Tensor,
    rule: Repack,
    into: list[tuple[str, torch.Size]],
    match: re.Match[str],
) -> list[Piece]:
    values = tensor.transpose(-1, -2) if rule.transposed else tensor
    if rule.interleaved:
        order = torch.arange(values.shape[rule.axis], device=values.device)
        values = values.index_select(rule.axis, torch.cat((order[::2], order[1::2])))
    lead: tuple[Interval, ...] = ()
    if rule.index:
        number = int(match.expand(rule.index))
        lead, values = ((number, number + 1),), values[None]
    axis = rule.axis + len(lead)
    if rule.half is not None:
        ((weight, shape),) = into
        rows, whole = shape[axis] // 2, tuple((0, size) for size in shape[len(lead) : axis])
        return [
            Piece(
                weight=weight,
                region=(*lead, *whole, (rule.half * rows, (rule.half + 1) * rows)),
                values=values,
            )
        ]
    if rule.part is not None:
        ((weight, shape),) = into
        start = rule.part * len(values) + (shape[0] if rule.part < 0 else 0)
        if not 0 <= start <= shape[0] - len(values):
            raise ConfigError(
                f"tensor {name} has {len(values)} rows, which do not fit {weight} of {shape[0]}"
            )
        return [Piece(weight=weight, region=((start, start + len(values)),), values=values)]
    sizes = [shape[axis] for _, shape in into]
    if len(into) > 1 and sum(sizes) != values.shape[axis]:
        shapes = ", ".join(f"{name} {size}" for (name, _), size in zip(into, sizes, strict=True))
        raise ConfigError(
            f"tensor {name} has shape {tuple(tensor.shape)}, the config asks for {sum(sizes)}"
            f" rows: {shapes}"
        )
    parts = values.split(sizes, dim=axis) if len(into) > 1 else (values,)
    return [
        Piece(weight=weight, region=lead, values=part)
        for (weight, _), part in zip(into, parts, strict=True)
    ]
