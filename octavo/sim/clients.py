"""Who sends requests in a simulation: conversations that share prefixes, resend, branch and go on.

Owns the shapes of prompts and sampling parameters, all drawn from one seeded generator. Knows no
scheduler and no cache.
"""

from __future__ import annotations

from random import Random

from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams

REMEMBERED = 24
"""Earlier conversations that new prompts are made from."""

CONSTRAINED = 5
"""Every so manieth request has a constraint."""


class Anything:
    """A constraint that forbids nothing: a fake runner only asks whose it is and what it sees."""

    def fork(self) -> Anything:
        """Another one."""
        return Anything()


class Clients:
    """Makes requests whose prompts share prefixes as real traffic does, over tokens ``[0,
    vocab_size)``.
    """

    def __init__(self, rng: Random, *, vocab_size: int, max_model_len: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._past: list[tuple[int, ...]] = []
        self._made = 0

    def remember(self, tokens: tuple[int, ...]) -> None:
        """A conversation, prompt and output, that a later turn may continue."""
        if len(self._past) == REMEMBERED:
            self._past.pop(self._rng.randrange(REMEMBERED))
        self._past.append(tokens)

    def request(self) -> Request:
        """The next request; a few are too long for the model."""
        rng = self._rng
        prompt = self._prompt()
        self._made += 1
        marks = (rng.randint(1, len(prompt)),) if rng.random() < 0.1 else ()
        self.remember(tuple(prompt))
        return Request(
            request_id=f"r{self._made}",
            prompt_token_ids=prompt,
            params=self._params(),
            eos_token_ids=frozenset({self._vocab_size - 1}),
            priority=rng.choice((0, 0, 0, 1, -1)),
            cache_salt=rng.choice(("", "", "", "", "", "tenant")),
            marks=marks,
            constraint=None if self._made % CONSTRAINED else Anything(),
        )

    def _prompt(self) -> list[int]:
        rng = self._rng
        shape = rng.random()
        if not self._past or shape < 0.25:
            return self._tokens(self._length())
        past = list(rng.choice(self._past))
        if shape < 0.45:
            return past
        if shape < 0.75:
            return past + self._tokens(rng.randint(1, 8))
        return past[: rng.randint(1, len(past))] + self._tokens(rng.randint(0, 8))

    def _length(self) -> int:
        rng, longest = self._rng, self._max_model_len
        return rng.choice(
            (
                rng.randint(1, 6),
                rng.randint(1, longest // 2),
                rng.randint(1, longest),
                rng.randint(longest, longest + 2),
            )
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def _params(self) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.choice((0, 1, 1, 2, 3, 5, 8, 13, 30, None))
        most = 4 if max_tokens is None else max_tokens
        return SamplingParams(
            n=rng.choice((1, 1, 1, 1, 1, 1, 2, 4)),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, 0, min(1, most), min(4, most))),
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
            logprobs=rng.choice((None, None, None, 0)),
            prompt_logprobs=0 if rng.random() < 0.03 else None,
            seed=rng.choice((None, None, rng.randrange(3))),
            ignore_eos=rng.random() < 0.8,
            stop_token_ids=(0,) if rng.random() < 0.05 else (),
        )
