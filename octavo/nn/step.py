"""What every layer of a model sees of one step, computed once.

Owns ``Step`` and the protocol of a mixing layer. Knows no plan: ``runner/batch.py`` makes steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from octavo.ops.paged import CacheView

Caches = Mapping[str, CacheView]
"""A layer's streams by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step's tokens.

    positions: int64 [T]. last: int64, the tokens whose logits are wanted. memo: values that layers share within the step.
    """

    positions: Tensor
    last: Tensor
    memo: dict[Hashable, Any] = field(default_factory=dict)

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, run by the first layer that asks for ``key`` in this step."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


class Mixer(Protocol):
    """A torch layer of some kind: built as ``Class(kind, dtype, device)``."""

    hidden_size: int

    def __call__(self, hidden: Tensor, step: Step, caches: Caches) -> Tensor:
        """hidden [T, hidden_size] of the step's tokens -> [T, hidden_size]; reads and writes ``caches``."""
        ...
