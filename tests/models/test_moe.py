"""Families with experts: what is planned is what runs, which layers are sparse, and tensor names of
published checkpoints.
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo.base import ConfigError, UnsupportedError
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.rope import RopeParams
from tests import tiny

FAMILIES = find_families()
NAMES = (
    "qwen3_moe",
    "qwen3_moe_window",
    "glm4_moe",
    "glm4_moe_plain",
    "gpt_oss",
    "llama4",
    "llama4_plain",
)


def read(model_type: str, **config: Any) -> ModelSpec:
    return read_spec({"model_type": model_type, **config}, families=FAMILIES)


def attention(spec: ModelSpec, layer: int) -> Any:
    return spec.layers[layer].mixers[0][1].attention  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_groups_planned_are_groups_run(name: str) -> None:
    config: dict[str, Any] = {**tiny.BASE, **tiny.SPECS[name]}
    run, planned = (
        read_spec(config, families=FAMILIES),
        read_spec(config, families=FAMILIES, planning=True),
    )
    assert make_groups(run, "float32") == make_groups(planned, "float32")


def test_a_chunk_is_gone_one_token_behind_its_border() -> None:
    config: dict[str, Any] = {**tiny.BASE, **tiny.SPECS["llama4"]}
    spec = read_spec(config, families=FAMILIES)
    chunked, full = make_groups(spec, "float32")
    entry = 2 * 2 * 16 * 4
    assert (chunked.layers, full.layers) == ((0, 1, 2), (3,))
    assert [chunked.bytes_needed(n) // (3 * entry) for n in (15, 16, 17, 31, 32, 33)] == [
        15,
        0,
        1,
        15,
        0,
        1,
    ]
    assert [full.bytes_needed(n) // entry for n in (16, 17)] == [16, 17]


@pytest.mark.parametrize(
    ("model_type", "config", "sparse"),
    [
        (
            "qwen3_moe",
            {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            (1, 5),
        ),
        ("glm4_moe", {"num_hidden_layers": 4, "head_dim": 128, "first_k_dense_replace": 3}, (3,)),
        ("gpt_oss", {"num_hidden_layers": 2}, (0, 1)),
        ("llama4_text", {"num_hidden_layers": 5, "interleave_moe_layer_step": 2}, (1, 3)),
        ("llama4_text", {"num_hidden_layers": 5, "moe_layers": [4]}, (4,)),
    ],
)
def test_which_layers_have_experts(
    model_type: str, config: dict[str, Any], sparse: tuple[int, ...]
) -> None:
    assert read(model_type, **config).options["moe"].layers == sparse


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3_moe", {"num_experts": 0}),
        ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]}),
        ("glm4_moe", {"num_hidden_layers": 2, "head_dim": 128, "first_k_dense_replace": 2}),
        ("llama4_text", {"moe_layers": []}),
    ],
)
def test_models_of_a_sparse_family_may_be_dense(model_type: str, config: dict[str, Any]) -> None:
    assert read(model_type, **config).options["moe"] is None


def test_gpt_oss_says_its_rotation_or_has_the_class_own() -> None:
    own = RopeParams(
        theta=150000.0,
        rope_type="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
    )
    assert attention(read("gpt_oss"), 0).rope == own and attention(read("gpt_oss"), 1).sinks
    old = {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 8,
    }
    assert attention(read("gpt_oss", rope_theta=1e3, rope_scaling=old), 0).rope.theta == 1e3
    assert attention(
        read("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 5.0}), 0
    ).rope == RopeParams(theta=5.0)
    with pytest.raises(UnsupportedError, match="hidden_act 'gelu'"):
        read("gpt_oss", hidden_act="gelu")


def test_llama4_layers_rotate_or_are_tuned() -> None:
    spec = read(
        "llama4",
        text_config={"model_type": "llama4_text", "num_hidden_layers": 8, "floor_scale": 4},
    )
    assert [type(layer.mixers[0][1]).__name__ for layer in spec.layers] == (
        ["ChunkedLocal"] * 3 + ["FullAttention"]
    ) * 2
    turned, still = attention(spec, 2), attention(spec, 3)
    assert (turned.rope, turned.qk_unit_norm, turned.temperature) == (
        RopeParams(theta=5e5, interleaved=True),
        True,
        None,
    )
    assert (still.rope, still.qk_unit_norm, still.temperature) == (None, False, (4, 0.1))
    with pytest.raises(ConfigError, match="no_rope_layers names 2 layers"):
        read("llama4_text", no_rope_layers=[1, 0])


@pytest.mark.parametrize(
    ("family", "stored", "module"),
    [
        ("gpt_oss", "model.layers.3.mlp.router.bias", "model.layers.3.mlp.gate.bias"),
        (
            "gpt_oss",
            "model.layers.3.mlp.experts.down_proj_blocks",
            "model.layers.3.mlp.experts.down_proj_blocks",
        ),
        (
            "llama4_text",
            "language_model.model.layers.0.feed_forward.router.weight",
            "model.layers.0.mlp.gate.weight",
        ),
        (
            "llama4_text",
            "model.layers.0.feed_forward.experts.down_proj",
            "model.layers.0.mlp.experts.down_proj",
        ),
        (
            "llama4_text",
            "language_model.model.layers.1.feed_forward.shared_expert.up_proj.weight",
            "model.layers.1.mlp.shared_experts.up_proj.weight",
        ),
        ("llama4_text", "language_model.lm_head.weight", "lm_head.weight"),
        ("llama4_text", "vision_model.class_embedding", None),
        ("llama4_text", "multi_modal_projector.linear_1.weight", None),
    ],
)
def test_tensor_names_of_checkpoints(family: str, stored: str, module: str | None) -> None:
    assert FAMILIES.named(family).module_name(stored) == module
