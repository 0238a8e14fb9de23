"""What a multi-head latent attention layer remembers: one latent and one rotated key per token.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from octavo.spec.kind import Config, Kind
from octavo.spec.latent import LatentParams, latent_stream, read_latent
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes, Stream


@dataclass(frozen=True, kw_only=True)
class MultiHeadLatent(Kind):
    """Causal softmax attention whose keys and values are projected from a latent (DeepSeek-V2, V3,
    Kimi).
    """

    name: ClassVar[str] = "mla"
    layer: ClassVar[str] = "octavo.kinds.mla.layer:MultiHeadLatentLayer"
    reference: ClassVar[str] = "octavo.nn.latent:dense_latent"

    latent: LatentParams

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters by DeepSeek's key names; see ``octavo.spec.latent.read_latent``."""
        return cls(latent=read_latent(config, config["layer_types"][index]))

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``latent``, kept for ever; heads share it, so it is not cut by heads."""
        return (latent_stream(self.latent, dtypes),)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Queries from a latent of their own, biased and with YaRN's magnitude; from the hidden
        state; and without rotation.
        """
        rope = RopeParams(
            theta=10000.0,
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=0.8,
            interleaved=True,
        )
        sizes = LatentParams(
            hidden_size=48,
            num_heads=4,
            kv_lora_rank=24,
            rope_dim=8,
            nope_dim=12,
            value_dim=10,
            q_lora_rank=20,
            rope=rope,
            bias=True,
        )
        direct = replace(
            sizes, num_heads=2, q_lora_rank=None, bias=False, rope=RopeParams(theta=500.0)
        )
        return (
            cls(latent=sizes),
            cls(latent=direct),
            cls(latent=replace(direct, rope=None, norm_eps=1e-3)),
        )
