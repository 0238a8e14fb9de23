"""Parameters that every softmax-attention kind with separate K and V heads has in common.
Torch-free.

Owns ``AttentionParams``, its reading from a normalized config, and the stream such a layer keeps.
Knows no law: how long keys live is what makes the kinds different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.base import ConfigError, UnsupportedError
from octavo.spec.kind import PLANNING, Config, count
from octavo.spec.law import Law
from octavo.spec.rope import RopeParams, read_rope
from octavo.spec.stream import CacheDtypes, Field, Stream

NormStyle = Literal["scale", "wide", "offset", "center"]
"""RMSNorm multiplies by its weight (``scale``), by its weight before rounding (``wide``, Gemma 3n)
or by one plus its weight, before rounding (``offset``, Gemma); LayerNorm without bias subtracts the
mean first (``center``, Cohere).
"""


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """One attention layer's shapes and numbers.

    scale: factor of the scores. rope: None where nothing is rotated, and in parameters for
    planning. qk_norm: RMSNorm over each head of q and k, or over their whole projections, or None.
    bias, out_bias: of q/k/v and of o. softcap: cap of the scores by ``softcap * tanh(score /
        softcap)``, or None. sinks: a learnt logit per query head takes part in the softmax and
        carries no
    value. qk_unit_norm: q and k are divided by their root mean square after rotation. temperature:
    (floor_scale, attn_scale); the query at p is multiplied by ``1 + attn_scale * log(1 + floor((p +
    1) / floor_scale))`` (Llama 4). makes_kv: False where the layer reads the keys and values that
    another one makes. v_norm: RMSNorm without weights over each head of v. k_eq_v: values are the
    keys' projection, ahead of norm and rotation; there is no other. gated: each head's projection
    has a gate behind its query, whose sigmoid multiplies what the head has mixed.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeParams | None
    qk_norm: NormStyle | None = None
    qk_norm_over: Literal["head", "projection"] = "head"
    norm_eps: float = 1e-6
    bias: bool = False
    out_bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    qk_unit_norm: bool = False
    temperature: tuple[int, float] | None = None
    makes_kv: bool = True
    v_norm: bool = False
    k_eq_v: bool = False
    gated: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads"
                f" {self.num_kv_heads}"
            )
        if self.rope is not None and self.rope.rotated(self.head_dim) % 2:
            raise UnsupportedError(
                f"{self.rope.rotated(self.head_dim)} of head_dim {self.head_dim} rotate; they must"
                " be pairs"
            )


def read_attention(config: Config, layer_type: str) -> AttentionParams:
    """Attention parameters from a config that its family has normalized.

    Beyond upstream keys the family sets ``qk_norm`` (a ``NormStyle`` or None) and, where they are
    not as the defaults, ``qk_norm_over``, ``sinks``, ``qk_unit_norm``, ``temperature``, ``gated``
    and ``out_bias``, by default ``attention_bias`` too. Raises UnsupportedError naming the field.
    """
    heads, hidden_size = count(config, "num_attention_heads"), count(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % heads:
        raise ConfigError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and"
            " head_dim is not given"
        )
    head_dim = count({"head_dim": hidden_size // heads, **_given(config, "head_dim")}, "head_dim")
    kv_heads = count(
        {"num_key_value_heads": heads, **_given(config, "num_key_value_heads")},
        "num_key_value_heads",
    )
    scalar = config.get("query_pre_attn_scalar") or head_dim
    if not isinstance(scalar, int | float) or scalar <= 0:
        raise ConfigError(f"query_pre_attn_scalar must be a positive number, not {scalar!r}")
    scale = float(scalar) ** -0.5
    if config.get(PLANNING):
        return AttentionParams(
            hidden_size=hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            rope=None,
        )
    bias = bool(config.get("attention_bias", False))
    return AttentionParams(
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        rope=read_rope(config, layer_type),
        qk_norm=config.get("qk_norm"),
        qk_norm_over=config.get("qk_norm_over", "head"),
        norm_eps=float(config["rms_norm_eps"]),
        bias=bias,
        out_bias=bool(config.get("out_bias", bias)),
        softcap=config.get("attn_logit_softcapping"),
        sinks=bool(config.get("sinks", False)),
        qk_unit_norm=bool(config.get("qk_unit_norm", False)),
        temperature=config.get("temperature"),
        gated=bool(config.get("gated", False)),
    )


def _given(config: Config, name: str) -> dict[str, Any]:
    return {} if config.get(name) is None else {name: config[name]}


def kv_stream(params: AttentionParams, law: Law, dtypes: CacheDtypes) -> Stream:
    """Keys after norm and rotation, and values: one entry per token, heads outermost in a page."""
    shape = (params.num_kv_heads, params.head_dim)
    fields = tuple(
        Field(name=name, shape=shape, dtype=dtypes.kv, shard="heads") for name in ("k", "v")
    )
    return Stream(name="kv", law=law, fields=fields)
