"""What every layer of a model sees of one step, computed once.

Owns ``Step`` and the protocol of a mixing layer. Knows no plan: ``runner/batch.py`` makes steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.ops.paged import CacheView

Caches = Mapping[str, CacheView]
"""A layer's streams by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step's tokens, laid out one request after another.

    token_ids, positions: int64 [T]. last: int64, the tokens whose logits are wanted. cuts: R + 1
    places; request i's tokens are ``[cuts[i], cuts[i + 1])``. starts: R positions of the first of
    them. memo: values that layers share within the step.
    """

    token_ids: Tensor
    positions: Tensor
    last: Tensor
    cuts: Sequence[int]
    starts: Sequence[int]
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def alone(cls, count: int, device: torch.device | str = "cpu") -> Step:
        """One request's first ``count`` tokens, all alike: for oracles that run without a cache."""
        positions = torch.arange(count, device=device)
        return cls(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            last=positions[:0],
            cuts=(0, count),
            starts=(0,),
        )

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, run by the first layer that asks for ``key`` in this step."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def requests(self) -> Tensor:
        """int64 [T]: which request of the step each token belongs to."""
        return self.shared("requests", self._requests)

    def _requests(self) -> Tensor:
        cuts = torch.tensor(self.cuts, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.starts)), cuts.diff()).to(
            self.positions.device
        )


class Mixer(Protocol):
    """A torch layer of some kind: built as ``Class(kind, dtype, device)``."""

    hidden_size: int

    def __call__(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, hidden_size] of the step's tokens -> [T, hidden_size]; reads and writes
        ``caches``.
        """
        ...
