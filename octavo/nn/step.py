"""What every layer of a model sees of one step, computed once.

Owns ``Step`` and the protocol of a mixing layer. Knows no plan: ``runner/batch.py`` makes steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.ops.paged import CacheView
from octavo.ops.reads import Parts

Caches = Mapping[str, CacheView]
"""A layer's streams by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step's tokens, laid out one request after another.

    token_ids: int64 [E]. last: int64, the tokens whose logits are wanted. parts: where they stand,
        by request. memo: values that layers share within the step.
    """

    token_ids: Tensor
    last: Tensor
    parts: Parts
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def alone(cls, count: int, device: torch.device | str = "cpu") -> Step:
        """One request's first ``count`` tokens, all alike: for oracles that run without a cache."""
        tokens = torch.zeros(count, dtype=torch.int64, device=device)
        parts = Parts.of(np.array([0]), np.array([0, count]), device)
        return cls(token_ids=tokens, last=tokens[:0], parts=parts)

    @property
    def positions(self) -> Tensor:
        """int64 [E]."""
        return self.parts.positions

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, run by the first layer that asks for ``key`` in this step."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


class Mixer(Protocol):
    """A torch layer of some kind: built as ``Class(kind, dtype, device)``."""

    hidden_size: int

    def __call__(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, hidden_size] of the step's tokens -> [T, hidden_size]; reads and writes
        ``caches``.
        """
        ...
