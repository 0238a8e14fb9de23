"""What models that mix attention with layers of a state need beyond a plain decoder. Torch-free.

Owns ``SoloOptions``, ``HybridOptions`` and ``SharedOptions``: the content of ``ModelSpec.options``
for the decoders of ``octavo.nn.hybrid`` and ``octavo.nn.shared``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.base import ConfigError, UnsupportedError
from octavo.spec.decoder import DecoderOptions

PLAIN_ACTIVATION = "relu2"
"""The activation of MLPs without a gate."""


@dataclass(frozen=True, kw_only=True)
class SoloOptions(DecoderOptions):
    """Layers of one norm and one thing each: a mixer, an MLP without a gate, or experts.

    ``activation`` is that of MLPs and experts. wide_residual: layers add to a float32 sum, whatever
    the model's dtype.
    """

    wide_residual: bool = False

    def __post_init__(self) -> None:
        if self.activation != PLAIN_ACTIVATION:
            raise UnsupportedError(
                f"mlp_hidden_act {self.activation!r} is not supported; supported:"
                f" {PLAIN_ACTIVATION}"
            )


@dataclass(frozen=True, kw_only=True)
class HybridOptions(DecoderOptions):
    """Layers of mixers side by side and an MLP, with factors.

    residual_scale: of what mixers and MLP add. in_scales, out_scales: of a mixer's input and
        output, by its name.
    gate_scale, down_scale: of the gate ahead of its activation, and of the MLP's output.
    shared_only: the MLP is the shared expert of layers that have no others.
    """

    residual_scale: float = 1.0
    in_scales: Mapping[str, float] = field(default_factory=dict)
    out_scales: Mapping[str, float] = field(default_factory=dict)
    gate_scale: float = 1.0
    down_scale: float = 1.0
    shared_only: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedOptions(DecoderOptions):
    """Layers with a state, some of them behind one of a few transformer blocks that they share
    (Zamba2).

    blocks: how many there are, used in turn. adapter_rank: of the low-rank terms that every use of
        a block has of its own.
    attention_adapters: also of queries, keys and values.
    """

    blocks: int
    adapter_rank: int
    attention_adapters: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ConfigError(f"num_mem_blocks must be at least 1, not {self.blocks}")
