"""How a field holds numbers that a dtype alone does not say: as data, without tensors.

Owns ``Codec``, from which a plug-in derives its own, and the one that octavo's kinds use. Knows no
stream; what computes is named by path, and imported when a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Codec:
    """What a field's elements mean. Subclasses are frozen and compare by value."""

    coder: ClassVar[str]
    """``module:Class`` of what encodes and decodes: an ``octavo.ops.codec.Coder``."""

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of other fields of the stream that it fills too, such as scales."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Scaled(Codec):
    """Floats of 8 or 4 bits; every ``block`` of them shares a scale, a power of two (OCP
    Microscaling Formats 1.0).

    scale: name of the field that keeps scales, float32 or 8-bit exponents, one for each block, and
        possibly padding behind them. turned: what is kept is rotated (``ops.codec.hadamard``), and
        so must be what it is multiplied with.
    """

    coder: ClassVar[str] = "octavo.ops.codec:ScaledCoder"

    scale: str
    block: int
    turned: bool = False

    @property
    def beside(self) -> tuple[str, ...]:
        """The scales."""
        return (self.scale,)
