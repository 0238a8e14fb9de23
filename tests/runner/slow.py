"""The slow, obvious sampler: one row at a time in Python's floats. What the vectorised one is
compared with.

Owns the order of operations written out (bias, penalties, barred tokens, temperature, min-p, top-k,
top-p, inverse transform), and random logits to try it on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp, fsum, inf, log

import torch

from octavo.sched.sampling import SamplingParams

Row = list[float]


def logits_of(rows: int, vocab: int, seed: int = 0, steps: float = 0.0) -> torch.Tensor:
    """Random logits; with ``steps``, multiples of it, so that there are many ties."""
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return (made / steps).round() * steps if steps else made


def adjusted(
    row: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    barred: Collection[int] = (),
) -> Row:
    """Logits after bias, penalties and barred tokens."""
    made = []
    for token, logit in enumerate(row):
        value = logit + params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            value = (
                value / params.repetition_penalty
                if value > 0
                else value * params.repetition_penalty
            )
        value -= params.frequency_penalty * list(output).count(token)
        value -= params.presence_penalty * (token in output)
        made.append(value)
    after = [-inf if token in barred else value for token, value in enumerate(made)]
    return made if max(after) == -inf else after


def softmax(row: Row) -> Row:
    """Probabilities; -inf is 0."""
    top = max(row)
    weights = [exp(value - top) for value in row]
    return [weight / fsum(weights) for weight in weights]


def ranking(row: Sequence[float]) -> list[int]:
    """Tokens, likeliest first, ties by lower id."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


@dataclass
class Distribution:
    """Probabilities after all cuts, the order in which the running sum takes tokens, and how near a
    cut was to another set.
    """

    probabilities: Row
    order: list[int]
    margin: float

    def allows(self, token: int, point: float, slack: float = 1e-5) -> bool:
        """Could the token be drawn at ``point``, but for rounding?"""
        place = self.order.index(token)
        before = fsum(self.probabilities[other] for other in self.order[:place])
        own = self.probabilities[token]
        return own > 0 and before - slack <= point <= before + own + slack


def distribution(logits: Row, params: SamplingParams) -> Distribution:
    """What a token is drawn from, given adjusted logits. Not for greedy ones."""
    top, margin = max(logits), inf
    row = [(value - top) / params.temperature for value in logits]
    if params.min_p > 0:
        margin = min(margin, *(abs(value - log(params.min_p)) for value in row if value < 0), inf)
        row = [value if value >= log(params.min_p) else -inf for value in row]
    if 0 < params.top_k < len(row):
        kept = set(ranking(row)[: params.top_k])
        row = [value if token in kept else -inf for token, value in enumerate(row)]
    if params.top_p < 1:
        chances, before, kept = softmax(row), 0.0, set()
        for token in ranking(row):
            margin = min(margin, abs(before - params.top_p))
            if before < params.top_p:
                kept.add(token)
            before += chances[token]
        row = [value if token in kept else -inf for token, value in enumerate(row)]
    cut = 0 < params.top_k < len(row) or params.top_p < 1
    return Distribution(softmax(row), ranking(row) if cut else list(range(len(row))), margin)
