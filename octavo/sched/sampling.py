"""How a request wants its tokens chosen and where it wants to stop: plain data.

Owns ``SamplingParams`` and its validation. Knows no logits (``runner/sampler.py``) and no
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from octavo import arguments
from octavo.base import ConfigError
from octavo.sched.structured import StructuredOutputs

NUM_LOGPROBS = 20
"""Most alternatives reported for a token, as in the OpenAI API."""


MAX_N = 1 << 14
"""Most continuations of one prompt."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Choices of one request, in the words vLLM's users know.

    n: how many continuations of the prompt; they share its pages.
    temperature: 0 is greedy. top_p, top_k: nucleus and top-k cuts; 1.0 and 0 (or -1) switch them
        off. A top_p of 0 leaves the likeliest token.
    min_p: tokens less likely than this share of the likeliest one are cut; 0 switches it off.
    repetition_penalty: divides positive logits, multiplies negative ones, of every token in prompt
        and output; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logit of every token in the output,
        once or per occurrence.
    logit_bias: token id -> number added to its logit.
    seed: makes this request's tokens reproducible whatever else is in the batch; without one (None,
        or -1 as others write it) they differ each time, unless the engine was given a seed.
    max_tokens: None means as many as the model and the memory allow, which cut larger limits, too;
        0 computes the prompt alone. min_tokens: before that many, nothing ends the text.
    stop: strings that end the text (not included in it). stop_token_ids: ids that end it.
        ignore_eos: go on at end of sequence.
    logprobs: None, or how many likeliest tokens to report at every token beside the chosen one.
        prompt_logprobs: the same for every prompt token but the first; such a request computes its
            whole prompt.
    structured_outputs: what the output must look like; it ends where that does.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name, value in self._typed().items():
            object.__setattr__(self, name, value)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        _check(1 <= self.n <= MAX_N, f"n must be in [1, {MAX_N:,}], not {self.n}")
        _check(
            isfinite(self.temperature) and self.temperature >= 0,
            f"temperature must be at least 0, not {self.temperature}",
        )
        _check(0 <= self.top_p <= 1, f"top_p must be in [0, 1], not {self.top_p}")
        _check(
            self.top_k >= -1,
            f"top_k must be -1, 0 (both: off) or a positive count, not {self.top_k}",
        )
        _check(0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}")
        _check(
            0 < self.repetition_penalty < inf,
            f"repetition_penalty must be above 0, not {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(
                -2 <= getattr(self, name) <= 2,
                f"{name} must be in [-2, 2], not {getattr(self, name)}",
            )
        for token, bias in self.logit_bias.items():
            _check(
                -100 <= bias <= 100,
                f"logit_bias of token {token} must be in [-100, 100], not {bias}",
            )
        _check(
            self.max_tokens is None or self.max_tokens >= 0,
            f"max_tokens must be at least 0, not {self.max_tokens}",
        )
        most = inf if self.max_tokens is None else self.max_tokens
        _check(
            0 <= self.min_tokens <= most,
            f"min_tokens must be in [0, max_tokens], not {self.min_tokens}",
        )
        _check(all(self.stop), "stop must not contain an empty string")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(
                count is None or 0 <= count <= NUM_LOGPROBS,
                f"{name} must be in [0, {NUM_LOGPROBS}], not {count}",
            )
        _check(
            self.structured_outputs is None or not self.ignore_eos,
            "ignore_eos cannot be true where the output has a structure, which says where it ends",
        )

    def _typed(self) -> dict[str, Any]:
        """Every field as its own type says. Raises ConfigError for one that is of another."""
        typed: dict[str, Any] = {}
        for name in ("n", "top_k", "min_tokens"):
            typed[name] = arguments.whole(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            typed[name] = None if value is None else arguments.whole(name, value)
        for name in _NUMBERS:
            typed[name] = arguments.number(name, getattr(self, name))
        typed["ignore_eos"] = arguments.flag("ignore_eos", self.ignore_eos)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        stop = [] if stop is None else arguments.many("stop", stop, "texts")
        typed["stop"] = tuple(arguments.text("stop", one) for one in stop)
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        typed["stop_token_ids"] = tuple(arguments.wholes("stop_token_ids", ends, "token ids"))
        typed["logit_bias"] = _biases(self.logit_bias)
        wanted = self.structured_outputs
        _check(
            wanted is None or isinstance(wanted, StructuredOutputs),
            f"structured_outputs must be StructuredOutputs, not {arguments.shown(wanted)}",
        )
        return typed

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """True where the likeliest token is all that is asked of the model's logits, as they
        are.
        """
        return self.greedy and not (self.penalized or self.logit_bias or self.logprobs is not None)

    @property
    def penalized(self) -> bool:
        """True where earlier tokens change the logits of the next."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _biases(given: Any) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"logit_bias must map token ids to numbers, not be {arguments.shown(given)}"
        )
    found = {}
    for token, bias in given.items():
        # As clients of the OpenAI API write them: the keys of a JSON object are texts.
        written = isinstance(token, str) and token.isascii() and token.isdecimal()
        key = int(token) if written and len(token) < 20 else arguments.whole("logit_bias", token)
        found[key] = arguments.number("logit_bias", bias)
    return found


def _check(good: bool, message: str) -> None:
    if not good:
        raise ConfigError(message)
