"""Which functions of this folder are which ops, and where they run. Owns ``BACKEND``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from octavo.kernels.library import TYPES, available
from octavo.ops.cpu import pointwise, products
from octavo.ops.table import Backend, Place


def takes(place: Place) -> bool:
    """On CPUs in float32 and bfloat16, where kernels are compiled and not switched off."""
    return place.device.type == "cpu" and place.dtype in TYPES and available()


BACKEND: Final = Backend(
    name="cpu",
    takes=takes,
    ops=MappingProxyType(
        {
            "norm": pointwise.norm,
            "rotate": pointwise.rotate,
            "norm_rotate": pointwise.norm_rotate,
            "store": pointwise.store,
            "greedy": pointwise.greedy,
            "project": products.project,
            "project_together": products.project_together,
            "gated": products.gated,
            "project_heads": products.project_heads,
        }
    ),
)
