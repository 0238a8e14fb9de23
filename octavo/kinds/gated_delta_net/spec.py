"""What a gated delta net layer remembers: a matrix per value head, and the last inputs of its
convolution. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.state import check_multiple, read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Kind):
    """Linear attention by the gated delta rule (Yang et al. 2024); several value heads may share
    one key head.

    packed: projections' rows lie key head after key head, not all of q, then all of k. doubled: a
    token may overwrite twice what is there (strengths up to 2, Grazzi et al. 2025). activation:
    behind the convolution.
    """

    name: ClassVar[str] = "gated_delta_net"
    layer: ClassVar[str] = "octavo.kinds.gated_delta_net.layer:GatedDeltaNetLayer"
    reference: ClassVar[str] = "octavo.nn.delta:dense_delta"

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    packed: bool = False
    doubled: bool = False
    activation: str = "silu"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_multiple(
            self.value_heads, self.key_heads, ("linear_num_value_heads", "linear_num_key_heads")
        )

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by Qwen3-Next's key names, ``linear_*``. Raises ConfigError naming the field.

        Beyond them a family sets ``linear_packed`` and, where it is not ``rms_norm_eps``,
        ``linear_norm_eps``.
        """
        run: dict[str, Any] = {}
        if not config.get(PLANNING):
            run = {
                "packed": bool(config.get("linear_packed", False)),
                "doubled": bool(config.get("linear_allow_neg_eigval", False)),
                "activation": config["hidden_act"],
                "norm_eps": float(config.get("linear_norm_eps", config["rms_norm_eps"])),
            }
        return cls(
            hidden_size=count(config, "hidden_size"),
            key_heads=count(config, "linear_num_key_heads"),
            value_heads=count(config, "linear_num_value_heads"),
            key_dim=count(config, "linear_key_head_dim"),
            value_dim=count(config, "linear_value_head_dim"),
            kernel=read_kernel(config, "linear_conv_kernel_dim"),
            **run,
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: inputs of the convolution over q, k and v; recurrent [value heads,
        key dim, value dim].
        """
        keys = (self.key_heads, self.key_dim)
        conv = {"conv_q": keys, "conv_k": keys, "conv_v": (self.value_heads, self.value_dim)}
        shape = (self.value_heads, self.key_dim, self.value_dim)
        return (state_stream(dtypes, conv=conv, kernel=self.kernel, recurrent=shape),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """As many value heads as key heads with other sizes, and twice as many, packed."""
        return (
            cls(
                hidden_size=24,
                key_heads=2,
                value_heads=2,
                key_dim=6,
                value_dim=12,
                kernel=4,
                doubled=True,
            ),
            cls(
                hidden_size=24,
                key_heads=2,
                value_heads=4,
                key_dim=8,
                value_dim=8,
                kernel=3,
                packed=True,
            ),
        )
