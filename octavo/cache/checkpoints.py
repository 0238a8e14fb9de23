"""Where a request should be resumable: the policy of checkpoints.

Owns the choice of positions, nothing else. A checkpoint costs pages of the bounded groups only; a
model that never lets go can be resumed anywhere and needs none.

- *Replay boundary*: the end of the prompt, less the token that must be computed anyway: a resend
  hits here.
- *End of turn*: where a request stops, decided when it does: the next turn hits here. Rings that do
  not reach back to the last whole unit by then leave a *rolling* checkpoint behind while they
  decode: at every unit, in place of the one before.
- *Junction*: as far as another request's prefix matched although nothing could be resumed there:
  the next sibling hits here.
- *Interval* and *marks*: every so many tokens, and where the application says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo.base import ConfigError, floor_to
from octavo.cache.block_plan import NEVER


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """Positions are floored to ``unit`` tokens, as prefix hits are. ``interval``: tokens between
    regular ones, or None.
    """

    unit: int
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < self.unit:
            raise ConfigError(
                f"checkpoint_interval {self.interval} must be at least the hash unit of {self.unit}"
                " tokens"
            )

    def completes(self, start: np.ndarray) -> np.ndarray:
        """Where decoding the token at ``start`` completes a regular interval."""
        if self.interval is None:
            return np.zeros(len(start), bool)
        return (start + 1) % floor_to(self.interval, self.unit) == 0

    def rolls(self, start: np.ndarray) -> np.ndarray:
        """Where decoding the token at ``start`` leaves a rolling checkpoint behind, at ``start``
        tokens.
        """
        return (start % self.unit == 0) & (start > 0)

    def next_start(self, n: np.ndarray, rolling: np.ndarray) -> np.ndarray:
        """First ``start`` from ``n`` on at which decoding completes an interval or, where
        ``rolling``, has filled a unit.
        """
        roll = np.where(rolling, -(-np.maximum(n, 1) // self.unit) * self.unit, NEVER)
        if self.interval is None:
            return roll
        step = floor_to(self.interval, self.unit)
        return np.minimum(roll, n // step * step + step - 1)

    def positions(
        self, *, start: int, stop: int, known: int, marks: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """Checkpoints in ``(start, stop]`` of a request of which ``known`` tokens are known.
        ``marks``: junctions and hints.
        """
        wanted = {floor_to(known - 1, self.unit), *(floor_to(mark, self.unit) for mark in marks)}
        if self.interval is not None:
            step = floor_to(self.interval, self.unit)
            wanted.update(range(floor_to(start, step) + step, stop + 1, step))
        return tuple(sorted(position for position in wanted if start < position <= stop))
