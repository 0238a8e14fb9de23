"""From logits to tokens, for a whole batch at once.

Owns greedy choice, temperature, top-k and top-p. Every request draws from its own sequence: one number per generated token,
from
its seed (or the engine's and its id) and its count of output tokens, so a batch's other members never change what it draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.sched.sampling import SamplingParams

TOP_P_FIRST = 1024
"""Tokens that a top-p cut looks at before it sorts the whole vocabulary."""


def uniform(seed: int, stream: int, place: int) -> float:
    """The number in [0, 1) at ``place`` of the sequence of (seed, stream). Philox is counter based: no state between calls."""
    # Arrays: a list with a number beyond int64 would become floats, and many streams one.
    bits = np.random.Philox(
        key=np.array([seed % 2**64, stream % 2**64], np.uint64), counter=np.array([place, 0, 0, 0], np.uint64)
    )
    return float(np.random.Generator(bits).random())


def draw(params: SamplingParams, engine_seed: int, request_id: str, output_len: int) -> float:
    """The number that places a request's next token in its distribution."""
    if params.seed is not None:
        return uniform(params.seed, 0, output_len)
    named = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
    return uniform(engine_seed, named | 1, output_len)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], request_ids: Sequence[str], output_len: Sequence[int], *, seed: int
) -> list[int]:
    """One token per row. logits: float32 [B, vocab]; the other sequences have length B. seed: the engine's."""
    if not len(params):
        return []
    tokens = logits.argmax(dim=-1)
    rows = [i for i, p in enumerate(params) if not p.greedy]
    for cut in (False, True):
        chosen = [i for i in rows if (params[i].top_k > 0 or params[i].top_p < 1) == cut]
        if chosen:
            points = [draw(params[i], seed, request_ids[i], int(output_len[i])) for i in chosen]
            index = torch.tensor(chosen, device=logits.device)
            part = logits.index_select(0, index)
            part = part / part.new_tensor([params[i].temperature for i in chosen])[:, None]
            given = [params[i] for i in chosen]
            tokens[index] = _cut(part, given, points) if cut else _inverse(torch.softmax(part, dim=-1), points)
    return [int(token) for token in tokens.tolist()]


def _inverse(probabilities: Tensor, points: Sequence[float]) -> Tensor:
    """Inverse transform sampling: the first place at which the running sum exceeds point * total. [B, n] -> int64 [B]."""
    sums = probabilities.double().cumsum(dim=-1)
    target = sums.new_tensor(points)[:, None] * sums[:, -1:]
    place = torch.searchsorted(sums, target, right=True)[:, 0]
    # Rounding may put the target behind the last token that has any probability.
    last = (probabilities > 0).double().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(place, last)


def _cut(scaled: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> Tensor:
    """Sample within the top-k, and within that the smallest set of likeliest tokens that reaches top-p."""
    vocab = scaled.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    width = min(vocab, max(TOP_P_FIRST, *(limit for limit in (*limits, 0) if limit < vocab)))
    normal = torch.logsumexp(scaled, dim=-1, keepdim=True)
    # A rounded sum may reach 1 ahead of the last token, so 1 means no cut at all.
    top_p = scaled.new_tensor([p.top_p if p.top_p < 1 else float("inf") for p in params])[:, None]
    while True:
        values, tokens = scaled.topk(width, dim=-1)
        limit = scaled.new_tensor(limits)[:, None]
        kept = torch.arange(width, device=scaled.device)[None] < limit
        values = values.masked_fill(~kept, float("-inf"))
        # With a top-k the nucleus is taken of what the top-k left; without, of the whole vocabulary.
        total = torch.where(limit < vocab, torch.logsumexp(values, dim=-1, keepdim=True), normal)
        probabilities = torch.exp(values - total)
        before = probabilities.cumsum(dim=-1) - probabilities
        reached = (limit < vocab) | (before[:, -1:] >= top_p)
        if width == vocab or bool(reached.all()):
            break
        width = vocab
    probabilities = probabilities.masked_fill((before >= top_p) & (before > 0), 0)
    return tokens.gather(1, _inverse(probabilities, points)[:, None])[:, 0]
