"""What a Mamba-2 layer remembers: a state per head, and the last inputs of its convolution.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Self

from octavo.base import ConfigError
from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.state import check_multiple, read_kernel, state_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class Mamba2(Kind):
    """A state space with a scalar decay per head (Dao and Gu 2024); ``num_groups`` groups of heads
    share B and C.

    bias, out_bias, conv_bias: of input and output projections and of the convolution. norm: the
    output is normed in groups of channels, after it is multiplied by its gate or, norm_before_gate,
    ahead of that. in_scale: factor of the layer's input.
    segment_scales: factors of what the input is projected to: gate, x, B, C and time steps, by
        order (muP, Falcon-H1).
    dt_limit: least and greatest time step.
    """

    name: ClassVar[str] = "mamba2"
    layer: ClassVar[str] = "octavo.kinds.mamba2.layer:Mamba2Layer"
    reference: ClassVar[str] = "octavo.kinds.mamba2.reference:dense"

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    norm_before_gate: bool = False
    norm_eps: float = 1e-5
    in_scale: float = 1.0
    segment_scales: tuple[float, ...] = (1.0,) * 5
    dt_limit: tuple[float, float] = (0.0, inf)

    def __post_init__(self) -> None:
        check_multiple(self.num_heads, self.num_groups, ("mamba_n_heads", "mamba_n_groups"))
        if len(self.segment_scales) != 5:
            raise ConfigError(
                f"ssm_multipliers must be five numbers, not {list(self.segment_scales)}"
            )

    @property
    def inner_size(self) -> int:
        """Channels of x, of the gate and of the output, all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by Bamba's and Falcon-H1's key names.

        Besides upstream's, a family sets ``mamba_out_bias`` where it is not as ``mamba_proj_bias``,
        and ``mamba_rms_norm`` and ``mamba_norm_before_gate`` where they are not True and False.
        Raises ConfigError naming the field.
        """
        sizes = cls(
            hidden_size=count(config, "hidden_size"),
            num_heads=count(config, "mamba_n_heads"),
            head_dim=count(config, "mamba_d_head"),
            num_groups=count(config, "mamba_n_groups"),
            state_size=count(config, "mamba_d_state"),
            kernel=read_kernel(config, "mamba_d_conv"),
        )
        if config.get(PLANNING):
            return sizes
        bias = bool(config["mamba_proj_bias"])
        return replace(
            sizes,
            bias=bias,
            out_bias=bool(config.get("mamba_out_bias", bias)),
            conv_bias=bool(config["mamba_conv_bias"]),
            norm=bool(config.get("mamba_rms_norm", True)),
            norm_before_gate=bool(config.get("mamba_norm_before_gate", False)),
            norm_eps=float(config["rms_norm_eps"]),
            in_scale=float(config.get("ssm_in_multiplier") or 1.0),
            segment_scales=tuple(
                float(factor) for factor in config.get("ssm_multipliers") or (1.0,) * 5
            ),
            dt_limit=read_limit(config),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``state``: conv over x [heads, dim], B and C [groups, state]; recurrent
        [heads, dim, state].
        """
        shared = (self.num_groups, self.state_size)
        conv = {"conv_x": (self.num_heads, self.head_dim), "conv_b": shared, "conv_c": shared}
        shape = (self.num_heads, self.head_dim, self.state_size)
        return (state_stream(dtypes, conv=conv, kernel=self.kernel, recurrent=shape),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """One group; several, with a norm ahead of the gate, biases, factors and limits; no
        norm.
        """
        return (
            cls(hidden_size=24, num_heads=4, head_dim=12, num_groups=1, state_size=8, kernel=4),
            cls(
                hidden_size=24,
                num_heads=4,
                head_dim=6,
                num_groups=2,
                state_size=10,
                kernel=3,
                bias=True,
                out_bias=True,
                norm_before_gate=True,
                in_scale=0.7,
                segment_scales=(0.9, 1.2, 0.8, 1.1, 1.3),
                dt_limit=(0.3, 1.5),
            ),
            cls(
                hidden_size=16,
                num_heads=6,
                head_dim=4,
                num_groups=3,
                state_size=4,
                kernel=2,
                conv_bias=False,
                norm=False,
            ),
        )


def read_limit(config: Config) -> tuple[float, float]:
    """``time_step_limit``: least and greatest time step, (0, inf) where it is absent.

    Transformers writes infinity as ``{"__float__": "Infinity"}``. Raises ConfigError unless it is
    two ascending numbers.
    """
    given = config.get("time_step_limit") or (0.0, inf)
    try:
        least, most = (
            float(bound["__float__"] if isinstance(bound, Mapping) else _number(bound))
            for bound in given
        )
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"time_step_limit must be two numbers, not {given!r}") from error
    if not 0 <= least < most:
        raise ConfigError(f"time_step_limit {given!r} must be two ascending numbers from 0 on")
    return least, most


def _number(bound: Any) -> float:
    # JSON has no infinity of its own; what writers make of it instead means that there is no limit.
    return inf if bound is None else float(bound)
