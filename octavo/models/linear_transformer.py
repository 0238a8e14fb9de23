"""A decoder whose every layer is plain linear attention (Katharopoulos et al. 2020). Torch-free
data.

A family of octavo's own: no checkpoints of this kind are published in one format. Its config has
these keys: ``model_type`` ``linear_transformer``, ``vocab_size``, ``hidden_size``,
``intermediate_size``, ``num_hidden_layers``, ``num_attention_heads``, ``head_dim``, ``hidden_act``,
``rms_norm_eps``, ``tie_word_embeddings`` and ``max_position_embeddings``. Tensors have Llama's
names. Layers are Llama's but for the mixing; nothing says where a token stands, other than what
came before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.kinds.linear_attention.spec import LinearAttention
from octavo.models.common import LINEAR, decoder, layers_by_type
from octavo.models.mamba import NO_LIMIT
from octavo.models.weights import embeddings, gated_mlp
from octavo.spec.kind import Config, LayerSpec, count

DEFAULTS: Final = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": NO_LIMIT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer alike; heads share the hidden size unless they have one of their own."""
    shared = count(config, "hidden_size") // count(config, "num_attention_heads")
    return {
        "layer_types": [LINEAR] * count(config, "num_hidden_layers"),
        "head_dim": config.get("head_dim") or shared,
    }


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    """One mixer ``self_attn`` per layer."""
    return layers_by_type(config, {LINEAR: (("self_attn", LinearAttention),)})


def parameters(config: Config) -> int:
    """Four projections, an MLP and two norms per layer."""
    hidden, inner = (
        count(config, "hidden_size"),
        count(config, "num_attention_heads") * count(config, "head_dim"),
    )
    layer = 4 * hidden * inner + gated_mlp(hidden, count(config, "intermediate_size")) + 2 * hidden
    return embeddings(config) + count(config, "num_hidden_layers") * layer


FAMILY = decoder(
    "linear_transformer", defaults=DEFAULTS, spell=spell, layers=layers_of, parameters=parameters
)
