"""What sparse latent attention should compute: one query and token at a time, without a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kinds.dsa.layer import SparseLatentLayer
from octavo.nn.latent import dense_latent
from octavo.nn.step import Step


def sparse_latent(layer: SparseLatentLayer, hidden: Tensor) -> Tensor:
    """hidden [T, d] -> [T, d]; exact in float64. Of equal scores the token that came first counts
    as higher.
    """
    indexer, count = layer.indexer, hidden.shape[0]
    assert indexer is not None, "a layer that shares a choice cannot run alone"
    step = Step.alone(count, hidden.device)
    keys = indexer.key(hidden, step)
    q, weights = indexer.queries(hidden, layer.source(hidden), step)
    seen = []
    for query in range(count):
        scores = [
            float(weights[query] @ torch.relu(q[query] @ keys[token])) for token in range(query + 1)
        ]
        best = sorted(range(query + 1), key=lambda token: (-scores[token], token))
        seen.append(sorted(best[: indexer.kind.index_topk]))
    return dense_latent(layer, hidden, seen)
