"""Linear layers: what is kept of weights follows them, and several layers give what each gives
alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from octavo.nn.linear import Linear, Ready, project, together


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


def test_a_layer_follows_its_weights() -> None:
    x, one = torch.randn(3, 64), layer(64, 20, 0, bias=True)
    close(one(x), plain(x, one))
    one.weight.mul_(2)
    close(one(x), plain(x, one))
    one.weight = nn.Parameter(one.weight[:7], requires_grad=False)
    one.bias = nn.Parameter(one.bias[:7], requires_grad=False)
    assert one(x).shape == (3, 7)
    close(one(x), plain(x, one))
    one.weight.data = torch.randn(7, 64)
    close(one(x), plain(x, one))
    one.to(torch.bfloat16)
    assert one(x.bfloat16()).dtype == torch.bfloat16
    other = copy.deepcopy(one)
    other.weight.zero_()
    assert one(x.bfloat16()).abs().sum() > 0
    torch.testing.assert_close(other(x.bfloat16()), one.bias.expand(3, 7))


def test_weights_that_learn_do() -> None:
    x, one = torch.randn(3, 64), layer(64, 5, 0)
    assert not one(x).requires_grad
    one.weight.requires_grad_(True)
    one(x).sum().backward()
    torch.testing.assert_close(one.weight.grad, x.sum(0).expand(5, 64))


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (2, 3, 64), (40, 64)])
def test_several_layers_give_what_each_gives(shape: tuple[int, ...]) -> None:
    x, ready = torch.randn(shape), Ready()
    layers = [layer(64, 8, 0), layer(64, 33, 1, bias=True), layer(64, 1, 2)]
    for _ in range(2):
        for made, one in zip(together(x, layers, ready), layers, strict=True):
            close(made, plain(x, one))
    mixed = [layers[0], nn.Sequential(layers[1])]
    close(together(x, mixed, Ready())[1], plain(x, layers[1]))


def test_one_keeper_serves_changing_weights() -> None:
    x, ready = torch.randn(2, 32), Ready()
    for seed in range(3):
        weight = torch.randn(9, 32, generator=torch.Generator().manual_seed(seed))
        close(project(x, weight, ready), x @ weight.T)
