"""Experts over the tokens that chose them against one token and one expert at a time, for every way
of choosing and scoring.
"""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.base import ConfigError
from octavo.nn.moe import MoE
from octavo.spec.moe import MoEOptions

SIZE, INNER, TOKENS = 12, 10, 33
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "one": {"active": 1},
    "all": {"active": 6, "normalise": True},
    "normalised": {"normalise": True, "scale": 2.5},
    "biased": {"normalise": True, "router_bias": True, "bias": True, "clamp": (0.4, 1.7)},
    "sigmoid": {"scoring": "sigmoid", "scores_inputs": True, "shared_size": 7},
    "corrected": {
        "scoring": "sigmoid",
        "correction": True,
        "normalise": True,
        "scale": 1.5,
        "wide_router": True,
    },
    "grouped": {
        "scoring": "sigmoid",
        "correction": True,
        "groups": 3,
        "active_groups": 2,
        "shared_size": 5,
    },
    "grouped_softmax": {"groups": 2, "active_groups": 1},
    "grouped_by_the_best": {"groups": 3, "active_groups": 2, "group_best": 1, "scale": 1.5},
    "groups_of_one": {"groups": 6, "active_groups": 3, "group_best": 1},
}


def options(way: str) -> MoEOptions:
    return MoEOptions(
        **{"layers": (0,), "experts": 6, "active": 2, "inner_size": INNER, **WAYS[way]}
    )


def make(way: str) -> MoE:
    model = MoE(SIZE, "silu", options(way), dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for _, weight in sorted(model.named_parameters()):
        weight.data.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def chosen(logits: list[float], correction: list[float], way: MoEOptions) -> dict[int, float]:
    """Expert -> score of one token, in Python's floats."""
    total = sum(exp(value) for value in logits)
    scores = [
        1 / (1 + exp(-value)) if way.scoring == "sigmoid" else exp(value) / total
        for value in logits
    ]
    ranks = [score + extra for score, extra in zip(scores, correction, strict=True)]
    size = way.experts // way.groups
    groups = [range(first, first + size) for first in range(0, way.experts, size)]
    if way.groups > 1:
        groups.sort(
            key=lambda group: -sum(sorted(ranks[expert] for expert in group)[-way.group_best :])
        )
    eligible = [expert for group in groups[: way.active_groups] for expert in group]
    best = sorted(eligible, key=lambda expert: -ranks[expert])[: way.active]
    whole = sum(scores[expert] for expert in best) if way.normalise else 1.0
    return {expert: scores[expert] / whole * way.scale for expert in best}


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def slow(model: MoE, x: Tensor, way: MoEOptions) -> Tensor:
    """[SIZE] -> [SIZE] of one token."""
    weights = dict(model.named_parameters())
    bias = weights.get("gate.bias", torch.zeros(6))
    correction = weights.get("gate.e_score_correction_bias", torch.zeros(6)).tolist()
    out = torch.zeros_like(x)
    for expert, score in chosen(
        (weights["gate.weight"].to(x.dtype) @ x + bias).tolist(), correction, way
    ).items():
        both = weights["experts.gate_up_proj"][expert] @ (x * score if way.scores_inputs else x)
        if way.bias:
            both = both + weights["experts.gate_up_proj_bias"][expert]
        gate, up = both[:INNER], both[INNER:]
        if way.clamp is not None:
            limit, alpha = way.clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            mixed = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
        else:
            mixed = silu(gate) * up
        made = weights["experts.down_proj"][expert] @ mixed
        if way.bias:
            made = made + weights["experts.down_proj_bias"][expert]
        out += made if way.scores_inputs else made * score
    if way.shared_size:
        gate, up = (
            weights["shared_experts.gate_proj.weight"] @ x,
            weights["shared_experts.up_proj.weight"] @ x,
        )
        out += weights["shared_experts.down_proj.weight"] @ (silu(gate) * up)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_many_tokens_equal_one_token_at_a_time(way: str) -> None:
    model, tokens = (
        make(way),
        torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    )
    expected = torch.stack([slow(model, token, options(way)) for token in tokens])
    # Scores are float32.
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([model(tokens[:1]), model(tokens[1:])]), expected, rtol=1e-5, atol=1e-5
    )
    assert model(tokens[:0]).shape == (0, SIZE)


def test_scores_that_round_to_the_same_are_still_ranked() -> None:
    model = make("sigmoid")
    model.gate.weight.data.zero_()
    model.gate.weight.data[:, 0] = torch.tensor([40.0, 60.0, 50.0, 70.0, 20.0, 10.0])
    scores, experts = model.gate(torch.eye(SIZE, dtype=torch.float64)[:1])
    assert experts.tolist() == [[3, 1]] and scores.tolist() == [[1.0, 1.0]]


def test_only_chosen_experts_are_computed() -> None:
    model, x = make("one"), torch.ones(1, SIZE, dtype=torch.float64)
    ((expert,),) = model.gate(x)[1].tolist()
    expected = model(x)
    for other in set(range(6)) - {expert}:
        model.experts.down_proj.data[other] = float("nan")
    assert torch.equal(model(x), expected)


def test_a_wide_router_stays_wide() -> None:
    model = MoE(SIZE, "silu", options("corrected"), dtype=torch.bfloat16, device="cpu")
    assert {name: weight.dtype for name, weight in model.gate.named_parameters()} == {
        "weight": torch.float32,
        "e_score_correction_bias": torch.float32,
    }
    assert model.experts.gate_up_proj.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"active": 7}, "num_experts_per_tok 7"),
        ({"groups": 4}, "n_group 4"),
        ({"groups": 3, "active_groups": 4}, "topk_group 4"),
        ({"groups": 6, "active_groups": 6}, "groups of 1 experts"),
        ({"groups": 3, "active_groups": 1, "active": 3}, "num_experts_per_tok 3"),
    ],
)
def test_impossible_choices_are_named(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MoEOptions(**{"layers": (0,), "experts": 6, "active": 2, "inner_size": INNER, **wrong})  # type: ignore[arg-type]
