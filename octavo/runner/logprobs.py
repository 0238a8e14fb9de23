"""How likely tokens were by the model's own logits, and which tokens were likeliest.

Owns the order of tokens (likeliest first, ties by lower id) and ``TokenLogprobs``. Knows no
requests and no plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.runner.logits import slices
from octavo.sched.step import TokenLogprobs


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, tokens int64) of the ``count`` largest per row, largest first and ties by lower id.
    values: float32 [B, vocab].

    ``topk`` by itself leaves ties to the device and to the shape of the batch.
    """
    tokens = torch.cat(
        [_keys(values[part]).topk(count, dim=1).values for part in slices(*values.shape)]
    )
    tokens = values.shape[1] - 1 - (tokens & 0xFFFFFFFF)
    return values.gather(1, tokens), tokens


def _keys(values: Tensor) -> Tensor:
    """int64 [B, vocab] in the order wanted, no two of a row equal.

    The upper half is the bits of the float, which are in the order of floats once those of negative
    ones are turned over; the lower half is the id, counted from the end.
    """
    # -0.0 + 0.0 is 0.0.
    bits = (values + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.long()
    keys <<= 32
    keys |= torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return keys


def token_logprobs(
    logprobs: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """One for each row of float32 [B, vocab]: that of ``tokens[i]``, with the ``counts[i]``
    likeliest.
    """
    index = torch.tensor(tokens, device=logprobs.device)[:, None]
    chosen = logprobs.gather(1, index)
    ranks = (logprobs > chosen).sum(dim=1) + 1
    most = min(max(counts), logprobs.shape[1])
    values, ids = (
        (some.tolist() for some in likeliest(logprobs, most))
        if most
        else ([[]] * len(tokens), [[]] * len(tokens))
    )
    rows = zip(tokens, counts, chosen[:, 0].tolist(), ranks.tolist(), values, ids, strict=True)
    return [
        TokenLogprobs(
            token_id=token,
            logprob=own,
            rank=rank,
            top=tuple(zip(best[:count], row[:count], strict=True)),
        )
        for token, count, own, rank, row, best in rows
    ]
