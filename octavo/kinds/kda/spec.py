"""What a Kimi delta attention layer remembers: a matrix per head, and the last inputs of its
convolutions. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.state import read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class KimiDelta(Kind):
    """Linear attention by the delta rule with a decay per key channel (Kimi Linear, 2025)."""

    name: ClassVar[str] = "kda"
    layer: ClassVar[str] = "octavo.kinds.kda.layer:KimiDeltaLayer"
    reference: ClassVar[str] = "octavo.nn.delta:dense_delta"

    hidden_size: int
    num_heads: int
    head_dim: int
    kernel: int
    activation: str = "silu"
    norm_eps: float = 1e-5

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters from ``linear_num_heads``, ``linear_head_dim``, ``linear_conv_kernel_dim``.
        Raises ConfigError.
        """
        run: dict[str, Any] = {}
        if not config.get(PLANNING):
            run = {"activation": config["hidden_act"], "norm_eps": float(config["rms_norm_eps"])}
        return cls(
            hidden_size=count(config, "hidden_size"),
            num_heads=count(config, "linear_num_heads"),
            head_dim=count(config, "linear_head_dim"),
            kernel=read_kernel(config, "linear_conv_kernel_dim"),
            **run,
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: inputs of the convolutions over q, k and v; recurrent [heads, dim,
        dim].
        """
        heads = (self.num_heads, self.head_dim)
        conv = dict.fromkeys(("conv_q", "conv_k", "conv_v"), heads)
        return (
            state_stream(dtypes, conv=conv, kernel=self.kernel, recurrent=(*heads, self.head_dim)),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Several heads, and one."""
        return (
            cls(hidden_size=24, num_heads=3, head_dim=8, kernel=4),
            cls(hidden_size=24, num_heads=1, head_dim=10, kernel=2),
        )
