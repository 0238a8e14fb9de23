"""Arguments for every op: what a backend's implementation and the op's oracle are both called with.

Owns the making of them. A case has what is given when an op is called or prepared, and, for a
prepared one, what its result is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from octavo.ops.activation import Gating
from octavo.ops.table import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. given: arguments of the op. then: of what a prepared op gives; None where it is not
    prepared. changes: tensors among the arguments that the op writes to.
    """

    given: tuple[Any, ...]
    more: dict[str, Any] = field(default_factory=dict)
    then: tuple[Any, ...] | None = None
    changes: Callable[[Case], list[Tensor]] = lambda case: []


class Numbers:
    """Random tensors of one seed and dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self.generator)


def norm(some: Numbers) -> Iterator[Case]:
    for size in (5, 64):
        for style in ("scale", "wide", "offset", "center"):
            yield Case(given=(some(3, size) * 3 + 1, some(size), 1e-5, style))
        yield Case(given=(some(2, 4, size), None, 1e-5, "unit"))
    # A weight of another dtype, and rows that do not lie side by side.
    yield Case(given=(some(3, 32), some(32, dtype=torch.float32), 1e-5, "wide"))
    yield Case(given=(some(3, 32), some(32, dtype=torch.float32), 1e-5, "scale"))
    yield Case(given=(some(32, 3).T, some(32), 1e-5, "scale"))


def rotate(some: Numbers) -> Iterator[Case]:
    for rotated, size in ((8, 8), (6, 17)):
        for interleaved in (False, True):
            tables = some(4, 1, rotated), some(4, 1, rotated)
            yield Case(given=(some(4, 3, size), *tables), more={"interleaved": interleaved})
            yield Case(given=(some(4, 9, size)[:, 2:5], *tables), more={"interleaved": interleaved})
    wide = (some(4, 1, 8, dtype=torch.float32), some(4, 1, 8, dtype=torch.float32))
    yield Case(given=(some(4, 3, 8), *wide))


def norm_rotate(some: Numbers) -> Iterator[Case]:
    for style in ("scale", "offset"):
        x, weight, tables = some(4, 9, 12)[:, 2:5], some(12), (some(4, 1, 8), some(4, 1, 8))
        yield Case(given=(x, weight, 1e-5, style, *tables), more={"interleaved": style == "scale"})


def store(some: Numbers) -> Iterator[Case]:
    places = torch.tensor([6, 0, 3, 3]), torch.tensor([0, 3, 1, 2])
    entries = torch.tensor([5, 0, 1, 1])
    # Pages of one field between others, heads one behind the other.
    pages, made = some(7, 2, 3, 4, 5), some(6, 3, 9)[:, :, 2:7]
    fields = [pages[:, 1], pages[:, 0]]
    yield Case(
        given=(fields, *places, [made, made + 1], entries), changes=lambda case: case.given[0]
    )
    narrow = torch.randint(0, 100, (7, 1, 4, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    yield Case(
        given=([narrow], *places, [narrow[:6, :, 0].clone()], entries),
        changes=lambda case: [one.view(torch.uint8) for one in case.given[0]],
    )


def gather(some: Numbers) -> Iterator[Case]:
    yield Case(given=(some(7, 3, 4, 5), some.below(7, 2, 6), some.below(4, 2, 6)))


def greedy(some: Numbers) -> Iterator[Case]:
    yield Case(given=(some(3, 70_001).float(),))
    yield Case(given=(some(2, 40).round(),))
    yield Case(given=(some(40, 2).T,))


def project(some: Numbers) -> Iterator[Case]:
    for rows, outputs, size in ((1, 7, 64), (5, 33, 96), (40, 16, 32), (3, 4, 50)):
        weight, bias = some(outputs, size) / size**0.5, some(outputs) if rows != 5 else None
        yield Case(given=(weight, bias), then=(some(rows, 2 * size)[:, size:],))
    yield Case(given=(some(8, 64), None), then=(some(2, 3, 64),))


def project_together(some: Numbers) -> Iterator[Case]:
    for rows, size in ((1, 64), (40, 64), (2, 20)):
        weights = [some(outputs, size) / size**0.5 for outputs in (8, 33, 1)]
        yield Case(given=(weights, [None, some(33), None]), then=(some(rows, size),))


def gated(some: Numbers) -> Iterator[Case]:
    for rows in (2, 40):
        for gating in (
            *(Gating(activation=name) for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu2")),
            Gating(activation="silu", limit=0.5),
            Gating(activation="silu", clamp=(0.7, 1.7)),
        ):
            pair = some(24, 64) / 8, some(24, 64) / 8
            biases = (None, None) if gating.limit is None else (some(24), some(24))
            yield Case(given=(*pair, gating, biases), then=(some(rows, 64),))


def project_heads(some: Numbers) -> Iterator[Case]:
    for rows, inner, outer in ((1, 16, 48), (40, 16, 48), (3, 10, 7)):
        for flipped in (False, True):
            shape = (outer, inner) if flipped else (inner, outer)
            weight, x = some(3, *shape) / inner**0.5, some(3, rows, inner).transpose(0, 1)
            yield Case(given=(weight,), more={"flipped": flipped}, then=(x,))


def experts(some: Numbers) -> Iterator[Case]:
    for gating in (Gating(activation="silu"), Gating(activation="silu", clamp=(0.7, 1.7)), "relu2"):
        rows = 8 if gating == "relu2" else 16
        weights = ExpertWeights(
            first=some(5, rows, 12) / 4,
            last=some(5, 12, 8) / 4,
            gating=gating,
            first_bias=some(5, rows) if gating == "relu2" else None,
            last_bias=some(5, 12) if gating == "relu2" else None,
            scores_inputs=gating == Gating(activation="silu"),
        )
        chosen = torch.stack([torch.randperm(5, generator=some.generator)[:2] for _ in range(7)])
        yield Case(given=(weights,), then=(some(7, 12), some(7, 2).abs(), chosen))


CASES: Final = MappingProxyType(
    {
        made.__name__: made
        for made in (
            norm,
            rotate,
            norm_rotate,
            store,
            gather,
            greedy,
            project,
            project_together,
            gated,
            project_heads,
            experts,
        )
    }
)
"""By the name of the op."""
