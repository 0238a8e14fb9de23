"""Products with a model's weights by compiled kernels: few rows at the speed at which memory gives
the weights. Owns which products kernels take, and sends the others to plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.kernels.heads import MAX_ROWS, by_head, suits
from octavo.kernels.linear import Matrices
from octavo.ops.activation import Gating
from octavo.ops.table import Product
from octavo.ops.torch import products as plain


def project(weight: Tensor, bias: Tensor | None) -> Product:
    """``ProjectOp``."""
    matrices, other = Matrices(weight, biases=(bias,)), plain.project(weight, bias)
    if not matrices.possible:
        return other
    return lambda x: matrices(x) if matrices.takes(x) else other(x)


def project_together(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Callable[[Tensor], Sequence[Tensor]]:
    """``ProjectTogetherOp``: one product of all, where they are of one width."""
    matrices, other = Matrices(*weights, biases=biases), plain.project_together(weights, biases)
    if not matrices.possible:
        alone = [project(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return lambda x: [one(x) for one in alone]
    sizes = matrices.sizes

    def together(x: Tensor) -> Sequence[Tensor]:
        return matrices(x).split(sizes, dim=-1) if matrices.takes(x) else other(x)

    return together


def gated(
    gate: Tensor,
    up: Tensor,
    gating: Gating,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Product:
    """``GatedOp``: one product with both, where there is nothing but the activation between
    them.
    """
    if gating.limit is None and gating.clamp is None and biases == (None, None):
        matrices = Matrices(gate, up=up, activation=gating.activation)
        if matrices.possible:
            other = plain.gated(gate, up, gating)
            return lambda x: matrices(x) if matrices.takes(x) else other(x)
    first, second = project(gate, biases[0]), project(up, biases[1])
    return lambda x: gating.mix(first(x), second(x))


def project_heads(weight: Tensor, *, flipped: bool = False) -> Product:
    """``ProjectHeadsOp``."""
    other = plain.project_heads(weight, flipped=flipped)
    if not suits(weight):
        return other

    def run(x: Tensor) -> Tensor:
        few = 0 < x.shape[0] <= MAX_ROWS and x.dtype == weight.dtype
        return by_head(x, weight, flipped=flipped) if few else other(x)

    return run
