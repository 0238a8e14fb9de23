"""What DeepSeek-V4 needs beyond a plain decoder: several residual streams, and layers whose experts
a table names. Torch-free.

Owns ``HyperOptions``: the content of ``ModelSpec.options`` for ``octavo.nn.hyper``.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.spec.decoder import DecoderOptions
from octavo.spec.moe import MoEOptions


@dataclass(frozen=True, kw_only=True)
class HyperOptions(DecoderOptions):
    """A decoder with manifold-constrained hyper-connections (Xie et al. 2026).

    streams: residual streams of a token. rounds: how often the map between streams is normalised
        along rows and columns.
    floor: what is added ahead of divisions. hashed: experts of the layers that it names, in place
        of ``moe``.
    """

    streams: int
    rounds: int
    floor: float
    hashed: MoEOptions | None = None
