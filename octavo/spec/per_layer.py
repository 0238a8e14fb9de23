"""What Gemma 3n and Gemma 4 need beyond a plain decoder: a small input of its own for every layer.
Torch-free.

Owns ``PerLayerOptions`` and ``AltUpOptions``: the content of ``ModelSpec.options`` for
``octavo.nn.per_layer`` and ``octavo.nn.altup``.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.spec.decoder import DecoderOptions
from octavo.spec.moe import MoEOptions


@dataclass(frozen=True, kw_only=True)
class PerLayerOptions(DecoderOptions):
    """A decoder whose layers have inputs of their own.

    small_size: elements of a layer's input, 0 where layers have none. small_vocab: rows of its
        table; later tokens read row 0.
    inner_sizes: of the MLP, layer by layer. rounded_factors: factors of the small inputs are
        rounded to the model's dtype.
    beside: experts whose output is added to the MLP's, in all layers, whatever its ``layers`` say.
    """

    small_size: int
    small_vocab: int
    inner_sizes: tuple[int, ...]
    rounded_factors: bool = False
    beside: MoEOptions | None = None


@dataclass(frozen=True, kw_only=True)
class AltUpOptions(PerLayerOptions):
    """A decoder that carries several hidden states and updates one of them in full (AltUp, Baykal
    et al. 2023).

    streams: how many. active: the one that layers compute. correct_scale: the corrected one is
        scaled before the small input
    meets it. laurel_rank: of the low-rank residual (LAuReL). sparsity: of gate activations, layer
    by layer: what is below this quantile of a normal distribution becomes 0.
    """

    streams: int
    active: int
    correct_scale: bool
    laurel_rank: int
    sparsity: tuple[float, ...]
