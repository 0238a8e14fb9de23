"""What requests change about logits before anything is chosen: bias, penalties, barred tokens.

Owns ``adjust``. Knows sampling parameters; knows no randomness, no cuts, no plans. Work and memory
go with the rows that ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.sched.sampling import SamplingParams

History = tuple[np.ndarray, np.ndarray]
"""(prompt, output) tokens."""

SLICE_BYTES = 1 << 26
"""Most bytes of float32 [rows, vocab] that one slice of a computation over rows takes."""


def slices(rows: int, vocab: int) -> Iterable[slice]:
    """``range(rows)`` in slices of at most ``SLICE_BYTES`` of float32 logits, or of one row."""
    size = max(1, SLICE_BYTES // (4 * vocab))
    return (slice(first, min(rows, first + size)) for first in range(0, rows, size))


def adjust(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    history: Mapping[int, History],
    barred: Mapping[int, Sequence[int]],
) -> None:
    """Change float32 [B, vocab] in place, one SamplingParams per row: ``logit_bias``, then
    penalties, then barred tokens.

    history (of every row that is penalized) and barred are by row. Token ids outside the vocabulary
    name nothing and change
    nothing. Logits stay free of NaN: penalties end at the largest finite number. Where every token
    that was possible is barred,
    the row is not barred: a token has to come, and a text that ends early is better than one with
    an arbitrary token.
    """
    _bias(logits, {row: one.logit_bias for row, one in enumerate(params) if one.logit_bias})
    penalized = [row for row, one in enumerate(params) if one.penalized]
    for part in slices(len(penalized), logits.shape[1]):
        rows = penalized[part]
        _penalize(logits, rows, [params[row] for row in rows], [history[row] for row in rows])
    _bar(logits, {row: tokens for row, tokens in barred.items() if tokens})


def _places(
    tokens: Mapping[int, Iterable[int]], vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(rows, tokens), int64 each, of all tokens that exist."""
    pairs = [(row, token) for row, some in tokens.items() for token in some if 0 <= token < vocab]
    both = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _bias(logits: Tensor, biases: Mapping[int, Mapping[int, float]]) -> None:
    if not biases:
        return
    vocab = logits.shape[1]
    values = [
        bias for some in biases.values() for token, bias in some.items() if 0 <= token < vocab
    ]
    logits.index_put_(
        _places(biases, vocab, logits.device), logits.new_tensor(values), accumulate=True
    )


def _penalize(
    logits: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    history: Sequence[History],
) -> None:
    """Repetition, as CTRL defines it (arXiv 1909.05858) with the sign rule of its users; presence
    and frequency as OpenAI's API reference does.
    """
    vocab, limit = logits.shape[1], torch.finfo(torch.float32)
    index = torch.tensor(rows, device=logits.device)
    part = logits.index_select(0, index)

    def column(name: str) -> Tensor:
        return part.new_tensor([getattr(one, name) for one in params])[:, None]

    counts = _counts([output for _, output in history], vocab, part.device)
    seen = (counts > 0) | (_counts([prompt for prompt, _ in history], vocab, part.device) > 0)
    repetition = column("repetition_penalty").clamp(limit.tiny, limit.max)
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    made = (
        torch.where(seen, repeated, part)
        - counts * column("frequency_penalty")
        - (counts > 0) * column("presence_penalty")
    )
    made = torch.where(part.isinf(), part, made.clamp(limit.min, limit.max))
    logits.index_copy_(0, index, made)


def _counts(tokens: Sequence[np.ndarray], vocab: int, device: torch.device) -> Tensor:
    """How often each token occurs in each sequence, int32 [len(tokens), vocab]."""
    flat = np.concatenate([some.astype(np.int64) + row * vocab for row, some in enumerate(tokens)])
    places = torch.from_numpy(flat).to(device)
    counts = torch.zeros(len(tokens) * vocab, dtype=torch.int32, device=device)
    return counts.index_add_(0, places, counts.new_ones(()).expand(len(flat))).view(
        len(tokens), vocab
    )


def _bar(logits: Tensor, barred: Mapping[int, Sequence[int]]) -> None:
    if not barred:
        return
    rows, tokens = _places(barred, logits.shape[1], logits.device)
    before = logits[rows, tokens]
    logits[rows, tokens] = float("-inf")
    some = torch.tensor(list(barred), device=logits.device)
    possible = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    possible[some] = logits[some].amax(dim=1) > float("-inf")
    logits[rows, tokens] = torch.where(possible[rows], float("-inf"), before)
