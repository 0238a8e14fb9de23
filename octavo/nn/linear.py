"""Linear layers whose product is an op, alone or several at once. Knows no weights' names and no
caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from octavo.nn.module import Module
from octavo.ops.table import Ops, Product


class Linear(Module, nn.Linear):
    """``nn.Linear`` by ``Ops.project``."""

    product: Product | None = None

    def prepare(self) -> None:
        """Make the product."""
        self.product = self.ops.project(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return (self.product or self.ops.project(self.weight, self.bias))(x)


def together(
    layers: Sequence[Callable[[Tensor], Tensor]], ops: Ops
) -> Callable[[Tensor], Sequence[Tensor]]:
    """What computes the outputs [..., N] of layers that take the same x [..., K]: one op, where all
    are ``Linear``.
    """
    plain = [layer for layer in layers if type(layer) is Linear]
    if len(plain) < len(layers):
        return lambda x: [layer(x) for layer in layers]
    return ops.project_together([one.weight for one in plain], [one.bias for one in plain])
