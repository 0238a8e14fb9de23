"""Linear layers as decoding wants them: through compiled kernels where these are faster, alone or
several at once, else torch.

Owns the choice. Knows no weights' names and no caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.linear import Matrices


class Ready:
    """Keeps ``Matrices`` as long as they are of the same tensors. activation: as theirs, where they
    are a gated MLP's.
    """

    def __init__(self, activation: str | None = None) -> None:
        self._activation = activation
        self._kept: Matrices | None = None
        self._given: list[Tensor] = []
        self._known: list[int] = []

    def __reduce__(self) -> Any:
        # A copy of a module has other tensors.
        return Ready, (self._activation,)

    def of(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        up: Tensor | None = None,
    ) -> Matrices:
        """What ``Matrices`` makes of them, now or before."""
        given = [one for one in (*weights, *biases, up) if one is not None]
        # A tensor may get other memory, and another tensor the same.
        known = [*map(id, given), *[one.data_ptr() for one in given]]
        if self._kept is None or known != self._known:
            self._kept = Matrices(*weights, biases=biases, up=up, activation=self._activation)
            self._given, self._known = given, known
        return self._kept


def project(x: Tensor, weight: Tensor, ready: Ready) -> Tensor:
    """x [..., K] @ weight [N, K]^T -> [..., N]."""
    matrices = ready.of((weight,))
    return matrices(x) if matrices.takes(x) else F.linear(x, weight)


class Linear(nn.Linear):
    """``nn.Linear`` through ``Matrices``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ready = Ready()

    def __call__(self, x: Tensor) -> Tensor:
        """``forward``, at once and without hooks, as ``Norm`` does."""
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        weight, bias = self.weight, self.bias
        matrices = self._ready.of((weight,), (bias,))
        return matrices(x) if matrices.takes(x) else F.linear(x, weight, bias)


def together(x: Tensor, layers: Sequence[nn.Module], ready: Ready) -> Sequence[Tensor]:
    """The outputs [..., N] of layers that take the same x [..., K], from one product where a kernel
    takes them.
    """
    plain = [layer for layer in layers if type(layer) is Linear]
    if len(plain) == len(layers):
        matrices = ready.of([layer.weight for layer in plain], [layer.bias for layer in plain])
        if matrices.takes(x):
            return matrices(x).split(matrices.sizes, dim=-1)
    return [layer(x) for layer in layers]
