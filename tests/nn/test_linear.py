"""Linear layers: a module by itself follows its weights, a bound one what is changed in them in
place, and several layers give what each gives alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from octavo.nn.linear import Linear, together
from octavo.nn.mlp import MLP
from octavo.nn.module import bind
from octavo.ops.backends import ops_for
from octavo.ops.torch.backend import TORCH

BOUND = ops_for(torch.device("cpu"), torch.float32)


def layer(inputs: int, outputs: int, seed: int, *, bias: bool = False) -> Linear:
    made = Linear(inputs, outputs, bias=bias, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator))
    return made


def plain(x: torch.Tensor, one: nn.Linear) -> torch.Tensor:
    return nn.functional.linear(x, one.weight, one.bias)


def close(made: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4)


def test_a_layer_by_itself_follows_its_weights() -> None:
    x, one = torch.randn(3, 64), layer(64, 20, 0, bias=True)
    close(one(x), plain(x, one))
    one.weight = nn.Parameter(one.weight[:7], requires_grad=False)
    one.bias = nn.Parameter(one.bias[:7], requires_grad=False)
    assert one(x).shape == (3, 7)
    one.to(torch.bfloat16)
    assert one(x.bfloat16()).dtype == torch.bfloat16
    other = copy.deepcopy(one)
    other.weight.zero_()
    assert one(x.bfloat16()).abs().sum() > 0
    torch.testing.assert_close(other(x.bfloat16()), one.bias.expand(3, 7))


def test_a_bound_layer_follows_what_changes_in_place_and_can_be_bound_again() -> None:
    x, one = torch.randn(3, 64), layer(64, 20, 0, bias=True)
    bind(one, BOUND)
    close(one(x), plain(x, one))
    one.weight.mul_(2)
    close(one(x), plain(x, one))
    one.weight = nn.Parameter(torch.randn(20, 64), requires_grad=False)
    bind(one, BOUND)
    close(one(x), plain(x, one))


def test_weights_that_learn_do() -> None:
    x, one = torch.randn(3, 64), layer(64, 5, 0)
    assert not one(x).requires_grad
    one.weight.requires_grad_(True)
    one(x).sum().backward()
    torch.testing.assert_close(one.weight.grad, x.sum(0).expand(5, 64))


@pytest.mark.parametrize("ops", [TORCH, BOUND])
@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (2, 3, 64), (40, 64)])
def test_several_layers_give_what_each_gives(shape: tuple[int, ...], ops: object) -> None:
    x = torch.randn(shape)
    layers = [layer(64, 8, 0), layer(64, 33, 1, bias=True), layer(64, 1, 2)]
    run = together(layers, ops)  # type: ignore[arg-type]
    for _ in range(2):
        for made, one in zip(run(x), layers, strict=True):
            close(made, plain(x, one))
    mixed = together([layers[0], nn.Sequential(layers[1])], ops)  # type: ignore[arg-type]
    close(mixed(x)[1], plain(x, layers[1]))


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("bias", [True, False])
def test_binding_changes_no_mlp(limit: float | None, bias: bool) -> None:
    made = MLP(64, 96, "silu", bias=bias, limit=limit, dtype=torch.float32, device="cpu")
    x = torch.randn(3, 64)
    before = made(x)
    bind(made, BOUND)
    close(made(x), before)
