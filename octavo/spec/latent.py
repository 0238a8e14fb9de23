"""Latent attention's parameters and entries: one shared latent vector per token or per group of
tokens. Torch-free.

Owns ``LatentParams`` (DeepSeek's MLA) and ``CompressedParams`` (DeepSeek-V4), their reading from
normalized configs, and the
layouts of their entries in every dtype. Knows no law: which entries live how long is what makes the
kinds different.

Layouts of quantised entries are those of DeepSeek's FlashMLA and of vLLM: the part without position
in fp8 with its scales, the rotated part in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from octavo.base import ConfigError, ceil_div, round_up
from octavo.spec.codec import Scaled
from octavo.spec.kind import PLANNING, Config, count
from octavo.spec.law import Everything, Law, Tail
from octavo.spec.rope import RopeParams, read_rope
from octavo.spec.stream import FP4, FP8, CacheDtypes, Field, Stream

INDEX_FP8_BLOCK: Final = 128
"""Elements of an index key in fp8 that share a float32 scale."""

INDEX_FP4_BLOCK: Final = 32
"""Elements of an index key in fp4 that share an 8-bit exponent."""

SPARSE_FP8_BLOCK: Final = 128
"""Elements of a V3.2 latent in fp8 that share a float32 scale."""

COMPRESSED_FP8_BLOCK: Final = 64
"""Elements of a V4 entry in fp8 that share an 8-bit exponent."""


@dataclass(frozen=True, kw_only=True)
class LatentParams:
    """Shapes and numbers of multi-head latent attention (DeepSeek-V2, 2024).

    What is kept per token is a latent of ``kv_lora_rank`` elements behind its norm and one rotated
    key of ``rope_dim`` that all
    heads share. q_lora_rank: None where queries come from the hidden state directly. rope: of the
    last ``rope_dim`` elements of queries and keys; None where nothing is rotated, and in parameters
    for planning. norm_eps: of the norms of both latents.
    bias: of the projections from and to the hidden state, but for queries that come from it
        directly.
    """

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_lora_rank: int | None = None
    rope: RopeParams | None = None
    norm_eps: float = 1e-6
    bias: bool = False

    @property
    def scale(self) -> float:
        """Factor of the scores: a head's size, and the square of YaRN's magnitude by
        ``mscale_all_dim``.
        """
        scale, rope = float(self.nope_dim + self.rope_dim) ** -0.5, self.rope
        if (
            rope is None
            or rope.rope_type == "default"
            or not rope.mscale_all_dim
            or rope.factor <= 1
        ):
            return scale
        return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def read_latent(config: Config, layer_type: str) -> LatentParams:
    """Parameters of layers of ``layer_type`` by DeepSeek's key names. Raises ConfigError or
    UnsupportedError naming the field.

    ``rope_parameters`` may be one mapping per layer type, with None where nothing is rotated.
    Classes of Transformers give the latents' norms an epsilon of their own, 1e-6; a family in which
    it is another sets ``latent_norm_eps``.
    """
    return LatentParams(
        hidden_size=count(config, "hidden_size"),
        num_heads=count(config, "num_attention_heads"),
        kv_lora_rank=count(config, "kv_lora_rank"),
        rope_dim=count(config, "qk_rope_head_dim"),
        nope_dim=count(config, "qk_nope_head_dim"),
        value_dim=count(config, "v_head_dim"),
        q_lora_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
        rope=None if config.get(PLANNING) else read_rope(config, layer_type),
        norm_eps=float(config.get("latent_norm_eps", 1e-6)),
        bias=bool(config.get("attention_bias", False)),
    )


def latent_stream(params: LatentParams, dtypes: CacheDtypes) -> Stream:
    """Latent and rotated key of every token, in one dtype: 576 elements for every DeepSeek
    model.
    """
    fields = (
        Field(name="latent", shape=(params.kv_lora_rank,), dtype=dtypes.kv),
        Field(name="rope", shape=(params.rope_dim,), dtype=dtypes.kv),
    )
    return Stream(name="latent", law=Everything(), fields=fields)


def sparse_latent_stream(params: LatentParams, dtypes: CacheDtypes) -> Stream:
    """As ``latent_stream``; in fp8 with scales and the rotated key in bfloat16: 512 + 4 x 4 + 64 x
    2 = 656 bytes in V3.2.
    """
    if dtypes.kv != FP8:
        return latent_stream(params, dtypes)
    fields = (
        Field(
            name="latent",
            shape=(params.kv_lora_rank,),
            dtype=FP8,
            codec=Scaled(scale="scale", block=SPARSE_FP8_BLOCK),
        ),
        Field(
            name="scale", shape=(ceil_div(params.kv_lora_rank, SPARSE_FP8_BLOCK),), dtype="float32"
        ),
        Field(name="rope", shape=(params.rope_dim,), dtype="bfloat16"),
    )
    return Stream(name="latent", law=Everything(), fields=fields)


def index_stream(dim: int, dtypes: CacheDtypes, *, stride: int = 1) -> Stream:
    """One index key of ``dim`` elements per ``stride`` tokens, kept for ever: 132 bytes in fp8 and
    68 in fp4 for 128 elements.

    Raises ConfigError where fp4 cannot pair the elements.
    """
    fields: tuple[Field, ...] = (Field(name="key", shape=(dim,), dtype=dtypes.index_keys),)
    if dtypes.index_keys == FP8:
        codec = Scaled(scale="scale", block=INDEX_FP8_BLOCK, turned=True)
        fields = (
            Field(name="key", shape=(dim,), dtype=FP8, codec=codec),
            Field(name="scale", shape=(ceil_div(dim, INDEX_FP8_BLOCK),), dtype="float32"),
        )
    elif dtypes.index_keys == FP4:
        if dim % 2:
            raise ConfigError(f"index_head_dim {dim} is odd; fp4 keeps two elements in a byte")
        scale = Field(name="scale", shape=(ceil_div(dim, INDEX_FP4_BLOCK),), dtype="float8_e8m0fnu")
        codec = Scaled(scale="scale", block=INDEX_FP4_BLOCK, turned=True)
        fields = (Field(name="key", shape=(dim // 2,), dtype=FP4, codec=codec), scale)
    return Stream(name="index", law=Everything(), fields=fields, stride=stride)


@dataclass(frozen=True, kw_only=True)
class CompressedParams:
    """Shapes and numbers of DeepSeek-V4's attention: one head whose entries are key and value at
    once.

    rope_dim: elements of queries and entries, their last, that are rotated. window: tokens that
    every layer sees uncompressed, the query's own included. q_lora_rank: of the latent that all
    queries come from. o_groups: groups of heads whose outputs are each projected to o_lora_rank
    elements ahead of the output projection. rope: None in parameters for planning.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    window: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    norm_eps: float = 1e-6
    rope: RopeParams | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rope_dim < self.head_dim:
            raise ConfigError(
                f"qk_rope_head_dim {self.rope_dim} must be less than head_dim {self.head_dim}"
            )
        if self.num_heads % self.o_groups:
            raise ConfigError(
                f"o_groups {self.o_groups} must divide num_attention_heads {self.num_heads}"
            )

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim) ** -0.5


def read_compressed(config: Config, rotation: str, *, window: int) -> CompressedParams:
    """Parameters by DeepSeek-V4's key names, but for the window, rotated as
    ``rope_parameters[rotation]`` says.

    Raises ConfigError or UnsupportedError naming the field.
    """
    return CompressedParams(
        hidden_size=count(config, "hidden_size"),
        num_heads=count(config, "num_attention_heads"),
        head_dim=count(config, "head_dim"),
        rope_dim=count(config, "qk_rope_head_dim"),
        window=window,
        q_lora_rank=count(config, "q_lora_rank"),
        o_groups=count(config, "o_groups"),
        o_lora_rank=count(config, "o_lora_rank"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=None if config.get(PLANNING) else read_rope(config, rotation),
    )


def entry_stream(
    name: str, params: CompressedParams, law: Law, dtypes: CacheDtypes, *, stride: int = 1
) -> Stream:
    """Entries that are key and value at once. In fp8: 448 + 64 x 2 + 8 (7 exponents, padded) =
    584.
    """
    fields: tuple[Field, ...] = (Field(name="kv", shape=(params.head_dim,), dtype=dtypes.kv),)
    if dtypes.kv == FP8:
        plain = params.head_dim - params.rope_dim
        fields = (
            Field(
                name="kv",
                shape=(plain,),
                dtype=FP8,
                codec=Scaled(scale="scale", block=COMPRESSED_FP8_BLOCK),
            ),
            Field(name="rope", shape=(params.rope_dim,), dtype="bfloat16", part="kv"),
            Field(
                name="scale",
                shape=(round_up(ceil_div(plain, COMPRESSED_FP8_BLOCK), 8),),
                dtype="float8_e8m0fnu",
            ),
        )
    return Stream(name=name, law=law, fields=fields, stride=stride)


def compressor_stream(name: str, dim: int, law: Tail, dtypes: CacheDtypes) -> Stream:
    """What a compressor must still see of single tokens: value and gate, twice as wide where it
    looks back beyond its group.

    A compressor with overlap projects every token once for its own entry and once for the next
    (DeepSeek-V4, CSA).
    """
    width = 2 * dim if law.overlap else dim
    fields = tuple(
        Field(name=field, shape=(width,), dtype=dtypes.state) for field in ("kv", "gate")
    )
    return Stream(name=name, law=law, fields=fields)
