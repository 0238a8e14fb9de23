"""DeepSeek-V4's attention written out, one query and one entry at a time: the oracle of the kinds
that ``nn.compressed`` runs.

Owns the formulas once more, in another shape: whole sequence in, whole sequence out, no cache, no
mask, no batch. Shares the layers' weights and rotary frequencies, nothing else. Everything is in
the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.nn.compressed import CompressedAttention, Compressor, Indexer
from octavo.nn.rope import frequencies
from octavo.spec.latent import CompressedParams

Read = Callable[[int], Sequence[Tensor]]
"""The compressed entries that the query at a position reads."""


def dense(layer: CompressedAttention, hidden: Tensor, read: Read | None = None) -> Tensor:
    """hidden [T, d] -> [T, d]: softmax over a window, what ``read`` gives, and a sink that carries
    no value.
    """
    params = layer.params
    queries, entries = [], []
    for position, x in enumerate(hidden):
        latent = _normed(layer.q_a_proj.weight @ x, layer.q_a_norm.weight, params.norm_eps)
        heads = (layer.q_b_proj.weight @ latent).view(params.num_heads, params.head_dim)
        queries.append(
            [_turned(params, _normed(head, 1.0, params.norm_eps), position) for head in heads]
        )
        entry = _normed(layer.kv_proj.weight @ x, layer.kv_norm.weight, params.norm_eps)
        entries.append(_turned(params, entry, position))
    made = []
    for position, heads_of in enumerate(queries):
        seen = torch.stack(
            [
                *entries[max(0, position - params.window + 1) : position + 1],
                *(read(position) if read else ()),
            ]
        )
        mixed = []
        for head, query in enumerate(heads_of):
            scores = torch.cat(
                (seen @ query * params.head_dim**-0.5, layer.sinks[head : head + 1].to(query.dtype))
            )
            mixed.append(_turned(params, torch.softmax(scores, dim=0)[:-1] @ seen, -position))
        made.append(_output(layer, mixed))
    return torch.stack(made)


def compress(compressor: Compressor, hidden: Tensor) -> list[Tensor]:
    """All whole entries of hidden [T, d], in order."""
    params, ratio, dim = compressor.params, compressor.ratio, compressor.dim
    made = []
    for number in range(hidden.shape[0] // ratio):
        first = number * ratio
        own = [(token, dim if compressor.overlap else 0) for token in range(first, first + ratio)]
        before = (
            [(token, 0) for token in range(first - ratio, first)]
            if compressor.overlap and number
            else []
        )
        values, gates = [], []
        for token, low in (*before, *own):
            values.append((compressor.kv_proj.weight @ hidden[token])[low : low + dim])
            gates.append(
                (
                    compressor.gate_proj.weight @ hidden[token]
                    + compressor.position_bias[token % ratio]
                )[low : low + dim]
            )
        pooled = (torch.softmax(torch.stack(gates), dim=0) * torch.stack(values)).sum(dim=0)
        made.append(
            _turned(params, _normed(pooled, compressor.kv_norm.weight, params.norm_eps), first)
        )
    return made


def choices(layer: CompressedAttention, indexer: Indexer, hidden: Tensor) -> list[list[int]]:
    """For every token of hidden [T, d] the entries with the highest index scores, of equal ones the
    lowest.
    """
    params, keys, made = layer.params, compress(indexer, hidden), []
    for position, x in enumerate(hidden):
        latent = _normed(layer.q_a_proj.weight @ x, layer.q_a_norm.weight, params.norm_eps)
        heads = [
            _turned(params, head, position)
            for head in (indexer.q_b_proj.weight @ latent).view(indexer.heads, indexer.dim)
        ]
        weights = (indexer.scorer.weights_proj.weight @ x).tolist()
        scores = {
            number: sum(
                weight * max(0.0, float(head @ keys[number]))
                for weight, head in zip(weights, heads, strict=True)
            )
            for number in range((position + 1) // indexer.ratio)
        }
        made.append(sorted(scores, key=lambda number: (-scores[number], number))[: indexer.topk])
    return made


def _normed(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def _turned(params: CompressedParams, x: Tensor, position: int) -> Tensor:
    """The last elements of one vector, pair by pair as complex numbers, turned to ``position``."""
    assert params.rope is not None
    inverse, _ = frequencies(params.rope, params.rope_dim, x.device)
    angles = (inverse * position).to(x.dtype)
    pairs = torch.view_as_complex(x[-params.rope_dim :].reshape(-1, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten()
    return torch.cat((x[: -params.rope_dim], turned))


def _output(layer: CompressedAttention, heads: list[Tensor]) -> Tensor:
    groups, rank = layer.params.o_groups, layer.params.o_lora_rank
    each = len(heads) // groups
    parts = [
        layer.o_a_proj.weight[group * rank : (group + 1) * rank]
        @ torch.cat(heads[group * each : (group + 1) * each])
        for group in range(groups)
    ]
    return layer.o_b_proj.weight @ torch.cat(parts)
