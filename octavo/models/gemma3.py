"""The Gemma 3 family, text only: five sliding-window layers to one full layer. Torch-free data.

Owns class defaults, refusals, tensor names of the multimodal checkpoints and GGUF conventions of
the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.models.common import (
    DECODER,
    FULL,
    GGUF_KEYS,
    GGUF_NAMES,
    IGNORED,
    SLIDING,
    decoder_options,
    gguf_config,
    refuse,
    rope_by_type,
    typed_layers,
)
from octavo.models.weights import biased, dense, head_norms
from octavo.spec.family import Family, GGUFRules
from octavo.spec.kind import Config, count
from octavo.spec.rope import LIMIT_IS_SCALED

DEFAULTS: Final = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""What Transformers' Gemma3TextConfig takes where the file is silent."""


def normalize(config: Config) -> Config:
    """Defaults filled in, ``layer_types`` and per-type ``rope_parameters`` spelled out, whatever
    the config's age.
    """
    refuse(config, {"use_bidirectional_attention": (False,)})
    full = {**DEFAULTS, **config, "qk_norm": "offset"}
    if not full.get("layer_types"):
        # Transformers itself reads only the first spelling; configs on the Hub carry either, and 6
        # where it matters.
        pattern = int(
            full.get("sliding_window_pattern") or full.get("_sliding_window_pattern") or 6
        )
        full["layer_types"] = [
            SLIDING if (index + 1) % pattern else FULL
            for index in range(count(full, "num_hidden_layers"))
        ]
    full["rope_parameters"] = rope_by_type(config, far=1e6, near=1e4)
    full[LIMIT_IS_SCALED] = True
    return full


def options(config: Config) -> Mapping[str, Any]:
    """Options of the decoder module."""
    return decoder_options(
        config,
        activation=config["hidden_activation"],
        norm="offset",
        placement="sandwich",
        embed_scale=float(config["hidden_size"]) ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Config from GGUF metadata of architecture ``gemma3``. Layer pattern and local theta are the
    architecture's own.
    """
    keys = {**GGUF_KEYS, "attention.sliding_window": "sliding_window"}
    known = (
        "attention.value_length",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.dimension_count",
        "rope.freq_base_swa",
    )
    config = gguf_config(metadata, keys, known)
    refuse(
        metadata,
        {
            "attention.value_length": (config["head_dim"],),
            "rope.dimension_count": (config["head_dim"],),
        },
    )
    if metadata.get("rope.scaling.type", "none") != "none":
        config["rope_scaling"] = {
            "rope_type": metadata["rope.scaling.type"],
            "factor": metadata["rope.scaling.factor"],
        }
    if "rope.freq_base_swa" in metadata:
        config["rope_local_base_freq"] = metadata["rope.freq_base_swa"]
    # 27B is the one size whose scores are not scaled by its head size: upstream config,
    # query_pre_attn_scalar 168.
    scalar = (
        config["hidden_size"] // config["num_attention_heads"]
        if config["num_hidden_layers"] == 62
        else config["head_dim"]
    )
    return {**config, "model_type": "gemma3_text", "query_pre_attn_scalar": scalar}


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    normalize=normalize,
    layers=typed_layers,
    defaults=DEFAULTS,
    parameters=dense(layer_norms=4, bias=biased, out_bias=biased, norms=head_norms),
    options=options,
    module=DECODER,
    names=(
        (r"(?:model\.language_model|language_model\.model)\.(.*)", r"model.\1"),
        (r"language_model\.lm_head\.weight", r"lm_head.weight"),
    ),
    ignored=(*IGNORED, r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*"),
    gguf=GGUFRules(
        architecture="gemma3",
        config=from_gguf,
        names=(
            *GGUF_NAMES,
            (
                r"blk\.(\d+)\.post_attention_norm\.weight",
                r"model.layers.\1.post_attention_layernorm.weight",
            ),
            (r"blk\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.pre_feedforward_layernorm.weight"),
            (
                r"blk\.(\d+)\.post_ffw_norm\.weight",
                r"model.layers.\1.post_feedforward_layernorm.weight",
            ),
        ),
        minus_one=r".*norm\.weight",
    ),
)
