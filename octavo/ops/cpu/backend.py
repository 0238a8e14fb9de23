"""Which functions of this folder are which ops, and where they run. Owns ``BACKEND``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from octavo.kernels.library import TYPES, available
from octavo.ops.cpu import attention, latent, pointwise, products, states
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
            "attend": attention.attend,
            "attend_latent": latent.attend_latent,
            "attend_sparse": latent.attend_sparse,
            "score_and_choose": latent.score_and_choose,
            "ssd_scan": states.ssd_scan,
            "delta_scan": states.delta_scan,
            "decayed_scan": states.decayed_scan,
            "feature_scan": states.feature_scan,
        }
    ),
)
