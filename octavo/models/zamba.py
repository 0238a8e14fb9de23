"""Zamba2: Mamba-2 layers, some of them behind a transformer block whose weights they share.
Torch-free data.

Owns class defaults and tensor names. Layers that share a block's weights have caches of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.base import UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import (
    IGNORED,
    LINEAR,
    decoder_options,
    layers_by_type,
    planned,
    refuse,
    rotated_only,
)
from octavo.models.hybrid import HYBRID, head_size
from octavo.models.weights import embeddings, gated_mlp, mamba2
from octavo.spec.hybrid import SharedOptions
from octavo.spec.kind import Config, LayerSpec, count

_ATTEND: Final = (6, 12, 18, 24, 30, 36, 42, 47, 51)

DEFAULTS: Final = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": None,
    "num_hidden_layers": 54,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "layers_block_type": tuple(HYBRID if index in _ATTEND else LINEAR for index in range(54)),
    "use_shared_attention_adapter": False,
    "use_mem_rope": False,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "adapter_rank": 128,
}
"""What Transformers' Zamba2Config takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Attention over hidden state and embedding side by side, so heads are twice as wide; Mamba-2
    in Bamba's words.

    Rotation has to be asked for. Transformers clamps time steps from below by ``time_step_min`` in
    prompts, and not while decoding; here they are not, so that cutting a prompt changes nothing.
    """
    refuse(config, {"add_bias_linear": (False,), "use_long_context": (False,)})
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    words = {"n_heads": "n_mamba_heads", "n_groups": "mamba_ngroups"}
    named: dict[str, Any] = {f"mamba_{name}": config[key] for name, key in words.items()}
    named["mamba_d_head"] = config.get("mamba_headdim")
    dim = config.get("attention_head_dim") or 2 * hidden // heads
    return {
        **named,
        **head_size({**config, **named}),
        **({} if config["use_mem_rope"] else {"rope_parameters": rotated_only(config)}),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "layer_types": config["layers_block_type"],
        "head_dim": dim,
        # Scores are scaled as if heads were as wide as elsewhere.
        "query_pre_attn_scalar": count({"head_dim": dim}, "head_dim") / 2,
        "intermediate_size": config.get("intermediate_size") or 4 * hidden,
    }


def layers(config: Config) -> tuple[LayerSpec, ...]:
    """Mamba-2 in every layer; hybrid ones share the weights of few attention blocks, each with a
    cache of its own.
    """
    mamba_only = (("mamba", Mamba2),)
    return layers_by_type(
        config,
        {
            LINEAR: mamba_only,
            HYBRID: (("shared_transformer.self_attn", FullAttention), *mamba_only),
        },
    )


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module. Raises UnsupportedError where an adapter would not fit its
    projection.
    """
    adapters, heads = (
        bool(config["use_shared_attention_adapter"]),
        count(config, "num_attention_heads"),
    )
    if adapters and (config.get("num_key_value_heads") or heads) != heads:
        raise UnsupportedError(
            f"num_key_value_heads {config['num_key_value_heads']} is not supported with"
            f" use_shared_attention_adapter; only num_attention_heads {heads} is"
        )
    options = SharedOptions(
        **decoder_options(config),
        blocks=count(config, "num_mem_blocks"),
        adapter_rank=count(config, "adapter_rank"),
        attention_adapters=adapters,
    )
    return dict(vars(options))


def parameters(config: Config) -> int:
    """Mamba-2 with a norm in every layer; shared blocks once each, and per hybrid layer a
    projection and adapters.
    """
    hidden, inner, made = (
        count(config, "hidden_size"),
        count(config, "intermediate_size"),
        embeddings(config),
    )
    specs, adapter_rank = layers(config), count(config, "adapter_rank")
    hybrid = [layer.mixers[0][1] for layer in specs if len(layer.mixers) > 1]
    for layer in specs:
        kind: Any = layer.mixers[-1][1]
        made += mamba2(kind, conv_bias=bool(config.get("use_conv_bias", True))) + hidden
    if hybrid:
        params: Any = hybrid[0]
        width = params.attention.num_heads * params.attention.head_dim
        block = 3 * 2 * hidden * width + width * hidden + gated_mlp(hidden, inner) + 3 * hidden
        made += min(count(config, "num_mem_blocks"), len(hybrid)) * block
        adapter = adapter_rank * (hidden + 2 * inner)
        adapter += (
            3 * adapter_rank * (2 * hidden + width)
            if config.get("use_shared_attention_adapter")
            else 0
        )
        made += len(hybrid) * (hidden * hidden + adapter)
    return made


FAMILY = replace(
    planned("zamba2", defaults=DEFAULTS, spell=spell, layers=layers, parameters=parameters),
    module="octavo.nn.shared:SharedDecoder",
    options=options,
    names=(
        (r"(model\.layers\.\d+)\.mamba_decoder\.(.*)", r"\1.\2"),
        (r"(.*\.self_attn)\.linear_([qkv])_adapter_list\.(.*)", r"\1.\2_proj.adapters.\3"),
        (r"(.*\.self_attn\.[qkv]_proj)\.weight", r"\1.base.weight"),
        (r"(.*\.feed_forward\.gate_up_proj)_adapter_list\.(.*)", r"\1.adapters.\2"),
        (r"(.*\.feed_forward\.gate_up_proj)\.weight", r"\1.base.weight"),
        (r"model\.final_layernorm\.weight", r"model.norm.weight"),
    ),
    ignored=IGNORED,
)
