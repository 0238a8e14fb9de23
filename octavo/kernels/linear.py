"""Products of rows with a weight matrix: few at the speed at which memory gives the weights, many
where torch is slower.

Owns the calls of csrc/linear.cpp. ``ops/oracles/products.py`` says what they compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from octavo.kernels.library import Library, library, type_number

MAX_ROWS = 32
"""Rows beyond which torch's matrix product is as fast, except for bfloat16 without instructions of
its own (``EMULATING``).
"""

EMULATING: Final = ("avx2", "avx512")
"""Instruction sets on which torch multiplies many rows of bfloat16 several times slower than these
kernels.
"""

GATES: Final = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
"""Gate activations, by Transformers' name, and their numbers in C."""

_MATRIX = Struct("2P q")
"""``struct Matrix``: weight, bias; n."""

_LINEAR = Struct("4P 5q 2i")
"""``struct Linear``: x, matrices, up, y; count, m, size, x_row, y_row; type, gate."""


class Matrices:
    """Weights [N, K] of one dtype and width, each with a bias [N] or None, made ready once for
    products with the same rows.

    up: a second weight [N, K], the only other one then being the gate of a gated MLP of this
        ``activation``. possible: whether kernels know their dtype, width and place.
    """

    def __init__(
        self,
        *weights: Tensor,
        biases: Sequence[Tensor | None] = (),
        up: Tensor | None = None,
        activation: str | None = None,
        kernels: Library | None = None,
    ) -> None:
        self._kernels, self._number = kernels or library(), type_number(weights[0].dtype)
        # Whoever holds pointers keeps what they point to, even where a tensor gets other memory.
        self._held = [one.detach() for one in (*weights, *biases, up) if one is not None]
        biases = biases or (None,) * len(weights)
        self.dtype, self._size = weights[0].dtype, weights[0].shape[1]
        self.sizes = [weight.shape[0] for weight in weights]
        self._width, self._gate = sum(self.sizes), GATES.get(activation, -1) if activation else 0
        everything = (*weights, *((up,) if up is not None else ()))
        assert up is None or (up.shape == weights[0].shape and len(weights) == 1), (
            "gate and up are alike"
        )
        assert all(
            one is None or (one.dtype == self.dtype and one.is_contiguous()) for one in biases
        )
        self.possible = (
            self._kernels is not None
            and self._number is not None
            and self._gate >= 0
            and self._size % 32 == 0
            and all(
                one.is_cpu
                and one.is_contiguous()
                and one.dtype == self.dtype
                and one.shape[1] == self._size
                for one in everything
            )
        )
        self._many = (
            self.dtype == torch.bfloat16
            and self._kernels is not None
            and self._kernels.isa in EMULATING
        )
        pairs = zip(weights, biases, strict=True)
        self._matrices = ctypes.create_string_buffer(
            b"".join(
                _MATRIX.pack(one.data_ptr(), bias.data_ptr() if bias is not None else 0, len(one))
                for one, bias in pairs
            )
        )
        self._address, self._up = (
            ctypes.addressof(self._matrices),
            up.data_ptr() if up is not None else 0,
        )

    def takes(self, x: Tensor) -> bool:
        """Whether products with x [..., K] are computed here, if any are (``possible``): x is of
        the weights' dtype, and has few rows or such as torch is slow with.
        """
        return (
            x.dtype == self.dtype
            and (elements := x.numel()) > 0
            and (self._many or elements <= MAX_ROWS * self._size)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., sum of N], the matrices' outputs side by side, summed in float32."""
        assert self.possible and self._kernels is not None, "of dtypes and widths that kernels know"
        size, shape = self._size, x.shape
        assert shape[-1] == size and x.dtype == self.dtype
        rows = x if len(shape) == 2 else x.reshape(-1, size)
        step, width = rows.stride()
        if width != 1:
            rows, step = rows.contiguous(), size
        y = x.new_empty((*shape[:-1], self._width))
        call = _LINEAR.pack(
            *(rows.data_ptr(), self._address, self._up, y.data_ptr()),
            *(len(self.sizes), len(rows), size, step, self._width),
            *(self._number, self._gate),
        )
        self._kernels.function("linear", ctypes.c_void_p, ctypes.c_int)(
            call, torch.get_num_threads()
        )
        return y


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernels: Library | None = None
) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N], all of one dtype, summed in float32."""
    return Matrices(weight, biases=(bias,), kernels=kernels)(x)


def gated(
    x: Tensor, gate: Tensor, up: Tensor, activation: str, *, kernels: Library | None = None
) -> Tensor:
    """``act(x @ gate^T) * (x @ up^T)`` for x [..., K], gate and up [N, K] -> [..., N].

    Both products are rounded to x's dtype, the activation and its product with the other one are
    not.
    """
    return Matrices(gate, up=up, activation=activation, kernels=kernels)(x)
