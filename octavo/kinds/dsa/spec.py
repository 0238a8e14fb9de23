"""What a sparse latent attention layer remembers: latents, and the index keys that choose among them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind, count
from octavo.spec.latent import LatentParams, index_stream, read_latent, sparse_latent_stream
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class SparseLatent(Kind):
    """Latent attention over the ``index_topk`` tokens with the highest index scores (DeepSeek-V3.2, GLM-5).

    shares_index: the layer takes the choice of the nearest layer before it that has an indexer, and keeps no index keys.
    """

    name: ClassVar[str] = "dsa"

    latent: LatentParams
    index_heads: int
    index_dim: int
    index_topk: int
    shares_index: bool = False

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by DeepSeek's key names; ``indexer_types[index]`` is ``full`` or ``shared``. Raises ConfigError."""
        return cls(
            latent=read_latent(config),
            index_heads=count(config, "index_n_heads"),
            index_dim=count(config, "index_head_dim"),
            index_topk=count(config, "index_topk"),
            shares_index=config["indexer_types"][index] == "shared",
        )

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """Streams ``latent`` and, unless it is shared, ``index``. Any token may be chosen later, so nothing is ever let go."""
        main = sparse_latent_stream(self.latent, dtypes)
        return (main,) if self.shares_index else (main, index_stream(self.index_dim, dtypes))

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """A layer with its own indexer, and one that shares."""
        sizes = LatentParams(
            hidden_size=48, num_heads=4, kv_lora_rank=24, rope_dim=8, nope_dim=12, value_dim=10, q_lora_rank=20
        )
        return tuple(
            cls(latent=sizes, index_heads=16, index_dim=8, index_topk=6, shares_index=shares) for shares in (False, True)
        )
