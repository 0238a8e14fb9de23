"""From logits to tokens, for a whole batch at once.

Owns greedy choice, temperature, min-p, top-k, top-p and the draw; what changes logits before is in
``runner/logits.py``. Every
request draws from its own sequence: one number per generated token, from its seed and branch (or
the engine's seed and its id) and its count of output tokens. Nothing that is computed for a row
depends on which other rows there are, so a batch's other members never change what it draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from torch import Tensor

from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH
from octavo.runner.logprobs import likeliest
from octavo.sched.sampling import SamplingParams

NEXT_TO_NOTHING = 1e-37
"""Stands for a top-p of 0."""

WIDTHS = (64, 1024)
"""Numbers of likeliest tokens that a cut looks at first."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One token to be chosen from row ``row`` of the logits; several continuations of a prompt may
    choose from one row.

    place: how many tokens the continuation has, which is the draw's place in its sequence.
    """

    row: int
    request_id: str
    params: SamplingParams
    place: int
    branch: int = 0


def uniform(seed: int, stream: int, place: int) -> float:
    """The number in [0, 1) at ``place`` of the sequence of (seed, stream). Philox is counter based:
    no state between calls.
    """
    # Arrays: a list with a number beyond int64 would become floats, and many streams one.
    bits = np.random.Philox(
        key=np.array([seed % 2**64, stream % 2**64], np.uint64),
        counter=np.array([place, 0, 0, 0], np.uint64),
    )
    return float(np.random.Generator(bits).random())


def draw(choice: Choice, engine_seed: int) -> float:
    """The number that places a choice in its distribution."""
    if choice.params.seed is not None:
        return uniform(choice.params.seed, choice.branch, choice.place)
    named = int.from_bytes(
        hashlib.blake2b(choice.request_id.encode(), digest_size=8).digest(), "little"
    )
    return uniform(engine_seed, named | 1, choice.place)


def sample(logits: Tensor, choices: Sequence[Choice], *, seed: int, ops: Ops = TORCH) -> list[int]:
    """One token per choice. logits: [B, vocab], float32 unless all choices are greedy. seed: the
    engine's.

    Ties go to the lowest id. Of logits that hold NaN, any token may come.
    """
    if not choices:
        return []
    drawn = [i for i, choice in enumerate(choices) if not choice.params.greedy]
    if len(drawn) == len(choices):
        tokens = _draw_tokens(logits, choices, seed)
    else:
        tokens = ops.greedy(logits)[_index([choice.row for choice in choices], logits)]
        if drawn:
            tokens[_index(drawn, logits)] = _draw_tokens(logits, [choices[i] for i in drawn], seed)
    return [int(token) for token in tokens.tolist()]


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _draw_tokens(logits: Tensor, choices: Sequence[Choice], seed: int) -> Tensor:
    """int64 [len(choices)]; none of them is greedy."""
    params = [choice.params for choice in choices]
    scaled = _scale(
        logits.index_select(0, _index([choice.row for choice in choices], logits)), params
    )
    points = torch.tensor(
        [draw(choice, seed) for choice in choices], dtype=torch.float64, device=logits.device
    )
    vocab = logits.shape[1]
    groups: dict[tuple[int, bool], list[int]] = {}
    for i, one in enumerate(params):
        groups.setdefault(_cut_of(one, vocab), []).append(i)
    tokens = torch.empty(len(choices), dtype=torch.int64, device=logits.device)
    for (width, limited), chosen in groups.items():
        index = _index(chosen, logits)
        part, given = (
            scaled.index_select(0, index) if len(groups) > 1 else scaled,
            [params[i] for i in chosen],
        )
        if limited:
            tokens[index] = _top_k(part, width, given, points[index])
        elif width:
            tokens[index] = _top_p(part, width, given, points[index])
        else:
            tokens[index] = _inverse(torch.softmax(part, dim=1), points[index])
    return tokens


def _cut_of(params: SamplingParams, vocab: int) -> tuple[int, bool]:
    """(likeliest tokens to look at first, 0 for no cut; is there a top-k?), by the row's own
    parameters only: sums over another number of tokens would be rounded otherwise.
    """
    limited = 0 < params.top_k < vocab
    if not limited and params.top_p == 1:
        return 0, False
    wanted = params.top_k if limited else WIDTHS[-1]
    return min(vocab, next((width for width in WIDTHS if width >= wanted), vocab)), limited


def _scale(part: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, then min-p: float32 [B, vocab] with a largest value of 0 in every row.
    Overwrites ``part``.
    """
    # Differences to the largest logit cannot overflow upwards, however cold it is.
    part -= part.amax(dim=1, keepdim=True)
    part /= part.new_tensor([one.temperature for one in params]).clamp(
        min=torch.finfo(part.dtype).tiny
    )[:, None]
    rows = [i for i, one in enumerate(params) if one.min_p > 0]
    if rows:
        index = _index(rows, part)
        least = part.new_tensor([log(params[i].min_p) for i in rows])[:, None]
        some = part.index_select(0, index)
        part.index_copy_(0, index, some.masked_fill(some < least, float("-inf")))
    return part


def _inverse(probabilities: Tensor, points: Tensor) -> Tensor:
    """Inverse transform sampling: the first place at which the running sum exceeds point * total.
    [B, n] -> int64 [B].
    """
    sums = probabilities.double().cumsum(dim=1)
    total = sums[:, -1:].contiguous()
    place = torch.searchsorted(sums, points[:, None] * total, right=True)
    # Rounding may put the target behind the last token that has any probability. Of NaN, any token
    # will do.
    return torch.minimum(place, torch.searchsorted(sums, total)).clamp(max=sums.shape[1] - 1)[:, 0]


def _nucleus(probabilities: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """(the smallest set of likeliest tokens that reaches top-p, the rest 0; whether each row
    reaches it). Likeliest first.
    """
    # A rounded sum may reach 1 ahead of the last token, so 1 means no cut at all; and 0 leaves the
    # likeliest.
    most = torch.tensor(
        [max(one.top_p, NEXT_TO_NOTHING) if one.top_p < 1 else 2.0 for one in params],
        device=probabilities.device,
    ).double()[:, None]
    doubles = probabilities.double()
    sums = doubles.cumsum(dim=1)
    return probabilities.masked_fill(sums - doubles >= most, 0), sums[:, -1] >= most[:, 0]


def _top_k(scaled: Tensor, width: int, params: Sequence[SamplingParams], points: Tensor) -> Tensor:
    """Sample within the top-k, and within that the nucleus of what it left. Ties at the border go
    to lower ids.
    """
    values, tokens = likeliest(scaled, width)
    limit = _index([one.top_k for one in params], scaled)[:, None]
    beyond = torch.arange(width, device=scaled.device)[None] >= limit
    kept, _ = _nucleus(torch.softmax(values.masked_fill(beyond, float("-inf")), dim=1), params)
    return tokens.gather(1, _inverse(kept, points)[:, None])[:, 0]


def _top_p(scaled: Tensor, width: int, params: Sequence[SamplingParams], points: Tensor) -> Tensor:
    """Sample within the nucleus of the whole vocabulary; rows whose nucleus is wider than ``width``
    look at more of it.
    """
    _, tokens = likeliest(scaled, width)
    kept, reached = _nucleus(torch.softmax(scaled, dim=1).gather(1, tokens), params)
    chosen = tokens.gather(1, _inverse(kept, points)[:, None])[:, 0]
    wider = [] if width == scaled.shape[1] else (~reached).nonzero()[:, 0].tolist()
    if wider:
        index = _index(wider, scaled)
        width = min(16 * width, scaled.shape[1])
        chosen[index] = _top_p(scaled[index], width, [params[i] for i in wider], points[index])
    return chosen
