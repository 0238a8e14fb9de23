"""Queries over latents, and what makes keys and values of these: what ``Ops.attend_latent`` takes.

One latent per token stands for the keys and values of all heads. They can be *expanded* from it, or
the projections be *absorbed* into queries and outputs, so that all heads attend to the latents
themselves (DeepSeek-V2, section 2.1.2). Both are the same but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.ops.table import Ops, Product


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """What makes keys and values of latents. up: [H, nope + value, rank], of each head its keys'
    rows first. nope: how many. scale: factor of the scores.

    absorb: queries for keys [n, H, nope] -> queries for latents [n, H, rank]. values: mixed latents
        [n, H, rank] -> mixed values [n, H, value]. Both are products with ``up``.
    """

    up: Tensor
    nope: int
    scale: float
    absorb: Product
    values: Product

    @classmethod
    def of(cls, up: Tensor, nope: int, scale: float, ops: Ops) -> Heads:
        """By the products that ``ops`` make."""
        return cls(
            up=up,
            nope=nope,
            scale=scale,
            absorb=ops.project_heads(up[:, :nope]),
            values=ops.project_heads(up[:, nope:], flipped=True),
        )

    @property
    def size(self) -> int:
        """Elements of a value."""
        return self.up.shape[1] - self.nope


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """Queries of a step or of some of it: plain [n, H, nope], rotated [n, H, rope].

    chosen: int64 [n, k], the entries that each attends to, of those it sees, ascending and -1 where
        there are fewer; None where it attends to all.
    """

    plain: Tensor
    rotated: Tensor
    chosen: Tensor | None = None

    def __getitem__(self, part: slice | Tensor) -> Queries:
        chosen = None if self.chosen is None else self.chosen[part]
        return Queries(plain=self.plain[part], rotated=self.rotated[part], chosen=chosen)

    @property
    def count(self) -> int:
        """n."""
        return self.plain.shape[0]
