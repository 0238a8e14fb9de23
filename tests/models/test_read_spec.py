"""From configs to layers: what each family reads, what it refuses, and that Transformers reads the
same.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.base import ConfigError, UnsupportedError
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.rope import RopeParams
from tests import tiny

FAMILIES = find_families()


def read(model_type: str, **given: Any) -> ModelSpec:
    return read_spec({"model_type": model_type, **given}, families=FAMILIES)


def names(spec: ModelSpec) -> list[str]:
    return [layer.mixers[0][1].name for layer in spec.layers]


def attention(spec: ModelSpec, layer: int) -> Any:
    return spec.layers[layer].mixers[0][1].attention


def test_llama_takes_class_defaults_where_the_file_is_silent() -> None:
    spec = read("llama")
    assert (len(spec.layers), spec.vocab_size, spec.max_model_len) == (32, 32000, 2048)
    assert names(spec) == ["full"] * 32
    params = attention(spec, 0)
    assert (params.num_heads, params.num_kv_heads, params.head_dim, params.scale) == (
        32,
        32,
        128,
        128**-0.5,
    )


def test_head_dim_need_not_be_hidden_by_heads() -> None:
    spec = read(
        "qwen3", hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    assert attention(spec, 0).head_dim == 128
    (group,) = make_groups(spec, "bfloat16")
    assert group.bytes_needed(10) == 10 * 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("use", [False, True])
def test_qwen3_window_counts_only_when_used(use: bool) -> None:
    spec = read(
        "qwen3", num_hidden_layers=4, use_sliding_window=use, sliding_window=64, max_window_layers=3
    )
    assert names(spec) == (["full"] * 3 + ["sliding"] if use else ["full"] * 4)


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma3_pattern_by_either_spelling(key: str) -> None:
    spec = read("gemma3_text", num_hidden_layers=7, sliding_window=8, **{key: 3})
    assert names(spec) == ["sliding", "sliding", "full"] * 2 + ["sliding"]


def test_gemma3_layer_types_past_the_layer_count_are_no_layers() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert names(read("gemma3_text", num_hidden_layers=2, layer_types=types)) == ["sliding", "full"]


OLD = {
    "rope_theta": 2e6,
    "rope_local_base_freq": 5e3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
NEW = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
}


@pytest.mark.parametrize("rope", [OLD, NEW], ids=["old", "new"])
def test_gemma3_rope_by_either_age(rope: dict[str, Any]) -> None:
    spec = read("gemma3_text", max_position_embeddings=1000, **rope)
    assert attention(spec, 0).rope == RopeParams(theta=5e3)
    far = attention(spec, 5).rope
    assert (far.theta, far.rope_type, far.factor) == (2e6, "linear", 8.0)


def test_gemma3_multimodal_unfolds_its_text_part() -> None:
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "hidden_size": 2560,
        "sliding_window": 1024,
    }
    spec = read("gemma3", text_config=text, vision_config={"hidden_size": 5})
    assert names(spec) == ["sliding"] * 5 + ["full"]
    assert spec.options["hidden_size"] == 2560
    assert (attention(spec, 0).num_heads, attention(spec, 0).num_kv_heads) == (8, 4)


def test_gemma3_multimodal_tensor_names_of_both_ages() -> None:
    family = FAMILIES.named("gemma3")
    for prefix in ("language_model.model.", "model.language_model."):
        assert (
            family.module_name(f"{prefix}layers.3.mlp.up_proj.weight")
            == "model.layers.3.mlp.up_proj.weight"
        )
    for prefix in ("", "model."):
        assert family.module_name(f"{prefix}vision_tower.vision_model.head.weight") is None
        assert (
            family.module_name(f"{prefix}multi_modal_projector.mm_input_projection_weight") is None
        )
    assert family.module_name("model.norm.weight") == "model.norm.weight"


def test_layers_without_rotation() -> None:
    def rotated(spec: ModelSpec) -> list[bool]:
        return [attention(spec, layer.index).rope is not None for layer in spec.layers]

    assert rotated(read("smollm3", num_hidden_layers=5)) == [True, True, True, False, True]
    assert rotated(read("smollm3", num_hidden_layers=3, no_rope_layers=[0, 1, 0])) == [
        False,
        True,
        False,
    ]
    for model_type in ("cohere2", "exaone4"):
        spec = read(model_type, num_hidden_layers=5)
        assert (
            rotated(spec)
            == [name == "sliding" for name in names(spec)]
            == [True, True, True, False, True]
        )
    assert rotated(read("exaone4", num_hidden_layers=2, sliding_window=None)) == [True, True]


def test_olmo3_scales_full_layers_only() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    spec = read("olmo3", num_hidden_layers=4, rope_theta=3e5, rope_scaling=scaling)
    assert attention(spec, 0).rope == RopeParams(theta=3e5)
    assert (attention(spec, 3).rope.rope_type, attention(spec, 3).rope.theta) == ("yarn", 3e5)


RUN = tuple(family for family in FAMILIES.families if family.module is not None)


def test_every_family_that_runs_has_a_tiny_model() -> None:
    tested = {FAMILIES.for_model_type(str(spec["model_type"])).name for spec in tiny.SPECS.values()}
    assert {family.name for family in RUN} == tested


CONFIGS = {name: {**tiny.BASE, **spec} for name, spec in tiny.SPECS.items()}
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v4": {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]},
}
"""What a class has no usable default for."""
CONFIGS |= {
    f"{family.name} by default": {
        "model_type": family.model_types[0],
        "head_dim": 128,
        **NEEDED.get(family.name, {}),
    }
    for family in RUN
}


@pytest.mark.parametrize("name", CONFIGS)
def test_planned_groups_are_those_that_run(name: str) -> None:
    planned, run = (
        make_groups(read_spec(CONFIGS[name], families=FAMILIES, planning=planning), "bfloat16")
        for planning in (True, False)
    )
    assert planned == run


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "rwkv"}, "model_type 'rwkv'"),
        ({"architectures": ["Strange"]}, "Strange"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
            "quantization_config",
        ),
        ({"model_type": "llama", "hidden_act": "relu"}, "hidden_act 'relu'"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.rope_type 'dynamic'",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": 1.0, "mrope_section": [1]}},
            "rope_parameters.mrope_section",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "low_freq_factor",
        ),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "llama", "rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "linear_attention"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1.0}},
            "rope_parameters.rope_theta",
        ),
        ({"model_type": "gemma3_text", "hidden_activation": "swish"}, "swish"),
        (
            {"model_type": "olmo3", "rope_parameters": {"rope_theta": 1.0}},
            "rope_parameters.rope_theta",
        ),
        ({"model_type": "cohere2", "use_qk_norm": True}, "use_qk_norm"),
        ({"model_type": "qwen2", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "rope_scaling.rope_type 'longrope'",
        ),
        (
            {"model_type": "phi3", "rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters.rope_type 'yarn'",
        ),
    ],
)
def test_refusals_name_the_field(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_spec(config, families=FAMILIES)
    assert named in str(caught.value)


@pytest.mark.parametrize("planning", [False, True])
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {
                "model_type": "llama",
                "num_attention_heads": 6,
                "num_key_value_heads": 4,
                "head_dim": 8,
            },
            "num_key_value_heads",
        ),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads"),
        (
            {"model_type": "llama", "num_attention_heads": 48},
            "hidden_size 4096 is not a multiple of num_attention_heads 48",
        ),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size must be a whole number"),
        ({"model_type": "llama", "max_position_embeddings": -1}, "max_position_embeddings"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
            "layer_types names 1 layers, num_hidden_layers says 32",
        ),
        ({"model_type": "qwen3", "layer_types": "full_attention"}, "layer_types"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma3_text", "num_hidden_layers": True}, "num_hidden_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], named: str, planning: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(config, families=FAMILIES, planning=planning)
    assert named in str(caught.value)


def test_unknown_model_type_lists_what_is_known() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"'gpt2' is not supported: no family .* know: .*gemma3_text, .*llama, .*qwen3,",
    ):
        read("gpt2")


def test_plugins_may_not_redefine_a_family() -> None:
    plugin = ModuleType("plugin")
    plugin.FAMILIES = (FAMILIES.named("llama"),)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="llama"):
        find_families([plugin])


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_config_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_load_config_takes_the_directory_or_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == {"model_type": "llama"}


def test_defaults_equal_the_classes_of_transformers() -> None:
    from transformers import AutoConfig

    from octavo.models import gemma3, llama, qwen3

    for model_type, module in (("llama", llama), ("qwen3", qwen3), ("gemma3_text", gemma3)):
        theirs = AutoConfig.for_model(model_type)
        for key, value in module.DEFAULTS.items():
            # Qwen3's window is None in the class once it is not used.
            if (model_type, key) != ("qwen3", "sliding_window"):
                assert getattr(theirs, key) == value, (model_type, key)
