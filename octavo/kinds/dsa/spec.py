"""What a sparse latent attention layer remembers: latents, and the index keys that choose among
them. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from octavo.base import ConfigError
from octavo.spec.kind import PLANNING, Config, Kind, count
from octavo.spec.latent import LatentParams, index_stream, read_latent, sparse_latent_stream
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class SparseLatent(Kind):
    """Latent attention over the ``index_topk`` tokens with the highest index scores (DeepSeek-V3.2,
    GLM-5).

    shares_index: the layer takes the choice of the nearest layer before it that has an indexer, and
        keeps no index keys.
    index_interleaved: index queries and keys rotate neighbours against each other (GLM-5), not
        halves (V3.2).
    """

    name: ClassVar[str] = "dsa"
    layer: ClassVar[str] = "octavo.kinds.dsa.layer:SparseLatentLayer"
    reference: ClassVar[str] = "octavo.kinds.dsa.reference:sparse_latent"

    latent: LatentParams
    index_heads: int
    index_dim: int
    index_topk: int
    shares_index: bool = False
    index_interleaved: bool = False

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by DeepSeek's key names; ``indexer_types[index]`` is ``full`` or ``shared``,
        and a family says how index keys rotate by ``index_interleaved``. Raises ConfigError.
        """
        latent, dim = (
            read_latent(config, config["layer_types"][index]),
            count(config, "index_head_dim"),
        )
        if not config.get(PLANNING):
            if latent.q_lora_rank is None:
                raise ConfigError(
                    "q_lora_rank must be given: index queries are projected from the queries'"
                    " latent"
                )
            if dim < latent.rope_dim:
                raise ConfigError(
                    f"index_head_dim {dim} is less than the qk_rope_head_dim {latent.rope_dim} of"
                    " it that rotate"
                )
        return cls(
            latent=latent,
            index_heads=count(config, "index_n_heads"),
            index_dim=dim,
            index_topk=count(config, "index_topk"),
            shares_index=config["indexer_types"][index] == "shared",
            index_interleaved=bool(config.get("index_interleaved", False)),
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """Streams ``latent`` and, unless it is shared, ``index``. Any token may be chosen later, so
        nothing is ever let go.
        """
        main = sparse_latent_stream(self.latent, dtypes)
        return (main,) if self.shares_index else (main, index_stream(self.index_dim, dtypes))

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Choices of few, many, one and all; either rotation. A layer that shares a choice cannot
        run alone.
        """
        sizes = LatentParams(
            hidden_size=48,
            num_heads=4,
            kv_lora_rank=24,
            rope_dim=8,
            nope_dim=12,
            value_dim=10,
            q_lora_rank=20,
            rope=RopeParams(theta=10000.0, interleaved=True),
        )
        few = cls(latent=sizes, index_heads=16, index_dim=8, index_topk=6)
        many = replace(few, index_dim=12, index_topk=24, index_interleaved=True)
        return (few, many, replace(few, index_topk=1), replace(few, index_heads=4, index_topk=64))
