"""OLMo Hybrid: gated delta nets with norms ahead, and full attention with norms behind, as a rule
without rotation. Torch-free data.

Owns class defaults, which layer is which, and its checkpoints' own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from octavo.kinds.gated_delta_net.spec import GatedDeltaNet
from octavo.models.common import FULL, IGNORED, LINEAR, decoder, decoder_options, every, listed
from octavo.models.qwen3_next import delta_layers
from octavo.models.weights import attention, embeddings, gated_delta_net, gated_mlp
from octavo.spec.family import Repack
from octavo.spec.kind import Config, count

DEFAULTS: Final = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""What Transformers' OlmoHybridConfig takes where the file is silent."""


def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every fourth layer is full, the last one of fewer; sizes of the delta nets follow from those
    of attention.

    Nothing is rotated unless the file gives a theta. The delta nets' norms have an epsilon of their
    own.
    """
    types = listed(config, "layer_types") or every(config, 4, FULL, LINEAR)
    if FULL not in types:
        types = [*types[:-1], FULL]
    heads = config.get("linear_num_key_heads") or count(config, "num_attention_heads")
    keys = config.get("linear_key_head_dim") or int(0.75 * count(config, "hidden_size") / heads)
    given = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    return {
        "layer_types": types,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": config.get("linear_num_value_heads")
        or config["num_attention_heads"],
        "linear_key_head_dim": keys,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * keys,
        "linear_norm_eps": 1e-5,
        "rope_parameters": {FULL: given if given.get("rope_theta") is not None else None},
        "qk_norm": "wide",
        "qk_norm_over": "projection",
    }


def parameters(config: Config) -> int:
    """Attention with norms over all heads, delta nets, MLPs, two norms per layer."""
    hidden, made = count(config, "hidden_size"), embeddings(config)
    for layer in delta_layers(config):
        kind: Any = layer.mixers[0][1]
        if isinstance(kind, GatedDeltaNet):
            made += gated_delta_net(kind)
        else:
            params, biased = kind.attention, bool(config.get("attention_bias", False))
            norms = (params.num_heads + params.num_kv_heads) * params.head_dim
            made += attention(params, norms=norms, bias=biased, out_bias=biased)
        made += gated_mlp(hidden, count(config, "intermediate_size")) + 2 * hidden
    return made


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    ahead = tuple(index for index, name in enumerate(config["layer_types"]) if name == LINEAR)
    return decoder_options(config, norm="wide", placement="post", pre_layers=ahead)


_PARTS: Final = (("q", 0), ("k", 1), ("v", -1))

FAMILY = replace(
    decoder(
        "olmo_hybrid",
        defaults=DEFAULTS,
        spell=spell,
        layers=delta_layers,
        parameters=parameters,
        options=options,
    ),
    names=(
        (r"(.*)\.attention_layer_norm\.weight", r"\1.input_layernorm.weight"),
        (r"(.*)\.feedforward_layer_norm\.weight", r"\1.post_attention_layernorm.weight"),
        (r"(.*)\.linear_attn\.(a|b)_proj\.weight", r"\1.linear_attn.in_proj_\2.weight"),
        (r"(.*)\.linear_attn\.g_proj\.weight", r"\1.linear_attn.in_proj_z.weight"),
        (r"(.*)\.linear_attn\.o_proj\.weight", r"\1.linear_attn.out_proj.weight"),
        (r"(.*)\.linear_attn\.o_norm\.weight", r"\1.linear_attn.norm.weight"),
    ),
    repack=tuple(
        Repack(
            pattern=rf"(.*\.linear_attn)\.{name}_{source}\.weight",
            into=(rf"\1.{target}.weight",),
            part=part,
        )
        for name, part in _PARTS
        for source, target in (("proj", "in_proj_qkv"), ("conv1d", "conv1d"))
    ),
    ignored=(*IGNORED, r"mtp\..*"),
)
