"""What the compiled kernels compute, written slowly: the oracle of ``tests/kernels``.

Owns nothing the engine runs. Everything is float64 and shares no code with the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.attention import Reads


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    reads: Reads,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attention.paged_attention`` in float64, one query and head at a time: [T, Hq, Dv]."""
    shared = q.shape[1] // keys.shape[1]
    out = torch.zeros(*q.shape[:2], values.shape[3], dtype=torch.float64)
    for request, start in enumerate(reads.start.tolist()):
        begin, end = reads.query_start[request : request + 2].tolist()
        seen = {
            token: [p for p in range(start + token - begin + 1) if _sees(reads, token, p)]
            for token in range(begin, end)
        }
        places = sorted({position for positions in seen.values() for position in positions})
        pairs = {
            p: _entry(keys, values, fresh_keys, fresh_values, reads, request, begin, p)
            for p in places
        }
        for token, positions in seen.items():
            k, v = (torch.stack([pairs[p][which] for p in positions]) for which in (0, 1))
            for head in range(q.shape[1]):
                scores = k[:, head // shared] @ q[token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[token, head] = (
                    torch.softmax(scores, dim=0)[: len(positions)] @ v[:, head // shared]
                )
    return out


def _sees(reads: Reads, token: int, position: int) -> bool:
    return reads.prefix is None or position < reads.prefix or position >= int(reads.first[token])


def _entry(
    keys: Tensor,
    values: Tensor,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    reads: Reads,
    request: int,
    begin: int,
    where: int,
) -> tuple[Tensor, Tensor]:
    """Key [Hkv, D] and value [Hkv, Dv] of position ``where``; ``begin``: the request's first token
    in the step.
    """
    past = where - int(reads.start[request])
    if bool(reads.fresh[request]) and past >= 0:
        return fresh_keys[begin + past].double(), fresh_values[begin + past].double()
    block, row = divmod(where, reads.block_tokens)
    if reads.fixed is not None and block >= reads.fixed:
        block = reads.fixed + (block - reads.fixed) % reads.turning
    page = int(reads.table[reads.rows[request], block])
    return keys[page, :, row].double(), values[page, :, row].double()
