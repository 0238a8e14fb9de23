"""Plain decoders with full and sliding-window layers, planned for: Mistral, Ministral, Phi-3, Qwen2, Gemma 2, Cohere 2, OLMo 2
and 3, EXAONE 4, GLM-4, SmolLM3. Torch-free data.

Owns their class defaults, which layers have a window, and what their layers have beside projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.models.common import FULL, SLIDING, every, planned
from octavo.models.weights import always, biased, dense, head_norms, whole_norms
from octavo.spec.kind import count


def window_everywhere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer has the window, unless there is none or ``layer_types`` says otherwise."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return {"layer_types": config.get("layer_types") or [kind] * count(config, "num_hidden_layers")}


def full_everywhere(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer sees everything."""
    return {"layer_types": [FULL] * count(config, "num_hidden_layers")}


def window_if_used(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A window counts only with ``use_sliding_window``, then from layer ``max_window_layers`` on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    layers = count(config, "num_hidden_layers")
    first = layers if window is None else count(config, "max_window_layers", 0)
    types = config.get("layer_types") or [SLIDING if index >= first else FULL for index in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def full_every(default: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """One layer in ``sliding_window_pattern``, a number or a string such as ``LLLG``, is full; without a window all are."""

    def spell(config: Mapping[str, Any]) -> Mapping[str, Any]:
        if config.get("layer_types"):
            return {}
        if config.get("sliding_window") is None:
            return full_everywhere(config)
        pattern = config.get("sliding_window_pattern") or default
        if isinstance(pattern, str):
            layers = count(config, "num_hidden_layers")
            types = [FULL if pattern[index % len(pattern)] == "G" else SLIDING for index in range(layers)]
            # The last layer sees everything, wherever the pattern ends.
            return {"layer_types": [*types[:-1], FULL]}
        return {"layer_types": every(config, pattern, FULL, SLIDING)}

    return spell


def nope_full(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """SmolLM3: a window, if used, is that of layers without rotation."""
    if config.get("layer_types"):
        return {}
    layers = count(config, "num_hidden_layers")
    rotated = config.get("no_rope_layers") or every(config, config["no_rope_layer_interval"], "", "rope")
    windowed = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return {"layer_types": [SLIDING if windowed and not rotated[index] else FULL for index in range(layers)]}


MISTRAL: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2: Final = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
PHI3: Final = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
GEMMA2: Final = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
COHERE2: Final = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
OLMO: Final = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
EXAONE4: Final = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
}
GLM4: Final = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
SMOLLM3: Final = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}

FAMILIES = (
    planned("mistral", defaults=MISTRAL, spell=window_everywhere, parameters=dense()),
    planned("ministral", defaults=MISTRAL, spell=window_everywhere, parameters=dense()),
    planned("phi3", defaults=PHI3, spell=window_everywhere, parameters=dense()),
    planned("qwen2", defaults=QWEN2, spell=window_if_used, parameters=dense(bias=always)),
    planned("gemma2", defaults=GEMMA2, spell=full_every(2), parameters=dense(layer_norms=4, bias=biased, out_bias=biased)),
    planned("cohere2", defaults=COHERE2, spell=full_every(4), parameters=dense(layer_norms=1, bias=biased, out_bias=biased)),
    planned("olmo2", defaults=OLMO, spell=full_everywhere, parameters=dense(norms=whole_norms)),
    planned("olmo3", defaults={**OLMO, "sliding_window": 4096}, spell=full_every(4), parameters=dense(norms=whole_norms)),
    planned("exaone4", defaults=EXAONE4, spell=full_every(4), parameters=dense(norms=head_norms)),
    planned("glm4", defaults=GLM4, spell=full_everywhere, parameters=dense(layer_norms=4, bias=biased)),
    planned("smollm3", defaults=SMOLLM3, spell=nope_full, parameters=dense(bias=biased, out_bias=biased, mlp_bias="mlp_bias")),
)
