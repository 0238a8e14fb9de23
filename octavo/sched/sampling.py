"""How a request wants its tokens chosen and where it wants to stop: plain data.

Owns ``SamplingParams`` and its validation. Knows no logits (``runner/sampler.py``) and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Choices of one request, in the words vLLM's users know.

    temperature: 0 is greedy. top_p, top_k: nucleus and top-k cuts; 1.0 and 0 (or -1) switch them off.
    seed: makes this request's tokens reproducible whatever else is in the batch.
    max_tokens: None means as many as the model and the memory allow.
    stop: strings that end the text (not included in it). stop_token_ids: ids that end it. ignore_eos: go on at end of sequence.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check(self.temperature >= 0, f"temperature must be at least 0, not {self.temperature}")
        _check(0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}")
        _check(self.top_k >= -1, f"top_k must be -1, 0 (both: off) or a positive count, not {self.top_k}")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _check(all(self.stop), "stop must not contain an empty string")

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature == 0


def _check(good: bool, message: str) -> None:
    if not good:
        raise ConfigError(message)
