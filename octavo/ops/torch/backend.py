"""Which functions of this folder are which ops. Owns ``BACKEND``, and ``TORCH``, what models
compute with until they are bound.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from octavo.ops.table import Backend, Place, bind_ops
from octavo.ops.torch import (
    attention,
    choice,
    conv,
    delta,
    latent,
    linear,
    pointwise,
    products,
    sparse,
    ssm,
)

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
            "attend": attention.attend,
            "attend_latent": latent.attend_latent,
            "attend_sparse": sparse.attend_sparse,
            "score_and_choose": choice.score_and_choose,
            "conv": conv.conv,
            "selective_scan": ssm.selective_scan,
            "ssd_scan": ssm.ssd_scan,
            "delta_scan": delta.delta_scan,
            "decayed_scan": linear.decayed_scan,
            "feature_scan": linear.feature_scan,
            "linear_scan": linear.linear_scan,
        }
    ),
)

TORCH: Final = bind_ops(Place(device=torch.device("cpu"), dtype=torch.float32), [BACKEND])
"""All of it in plain PyTorch."""
