"""Which functions of this folder are which ops. Owns ``BACKEND``, and ``TORCH``, what models
compute with until they are bound.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from octavo.ops.table import Backend, Place, bind_ops
from octavo.ops.torch import pointwise, products

BACKEND: Final = Backend(
    name="torch",
    takes=lambda place: True,
    ops=MappingProxyType(
        {
            "norm": pointwise.norm,
            "rotate": pointwise.rotate,
            "norm_rotate": pointwise.norm_rotate,
            "store": pointwise.store,
            "gather": pointwise.gather,
            "greedy": pointwise.greedy,
            "project": products.project,
            "project_together": products.project_together,
            "gated": products.gated,
            "project_heads": products.project_heads,
            "experts": products.experts,
        }
    ),
)

TORCH: Final = bind_ops(Place(device=torch.device("cpu"), dtype=torch.float32), [BACKEND])
"""All of it in plain PyTorch."""
