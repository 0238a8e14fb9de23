"""Families of delta nets, linear attention and small recurrences: what is read, planned, refused,
and called in checkpoints.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.base import ConfigError, UnsupportedError
from octavo.models.recurrent_gemma import in_bfloat16
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.law import Snapshot
from octavo.spec.stream import CacheDtypes
from tests import tiny, tiny_delta
from tests.plan.configs import path_of

FAMILIES = find_families()


def read(model_type: str, **config: Any) -> ModelSpec:
    return read_spec({"model_type": model_type, **config}, families=FAMILIES)


def kind(spec: ModelSpec, layer: int) -> Any:
    return spec.layers[layer].mixers[0][1]


@pytest.mark.parametrize("name", tiny_delta.SPECS)
def test_groups_planned_are_groups_run(name: str) -> None:
    config: dict[str, Any] = {**tiny.BASE, **tiny.SPECS[name]}
    run, planned = (
        read_spec(config, families=FAMILIES),
        read_spec(config, families=FAMILIES, planning=True),
    )
    assert make_groups(run, "float32") == make_groups(planned, "float32")


STATES = {
    "qwen3-next-80b-a3b": 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4),
    "qwen3.5-9b": 24 * (8192 * 3 * 2 + 32 * 128 * 128 * 4),
    "olmo-hybrid-7b": 24 * (11520 * 3 * 2 + 30 * 96 * 192 * 4),
    "kimi-linear-48b-a3b": 20 * (12288 * 3 * 2 + 32 * 128 * 128 * 4),
    "minimax-text-01-hf": 70 * 64 * 128 * 128 * 4,
    "recurrentgemma-2b": 18 * (2560 * 3 * 2 + 2560 * 4),
    "lfm2-1.2b": 10 * 2048 * 2 * 2,
}
"""Bytes of one snapshot of all layers: convolutions in bfloat16, recurrent states in float32."""


@pytest.mark.parametrize("name", STATES)
def test_a_request_holds_one_snapshot_however_long_it_is(name: str) -> None:
    spec = read_spec(load_config(path_of(name)), families=FAMILIES, planning=True)
    (group,) = (group for group in make_groups(spec, CacheDtypes()) if group.law == Snapshot())
    assert {group.bytes_needed(n) for n in (1, 1000, 100_000)} == {STATES[name]}


@pytest.mark.parametrize("name", STATES)
def test_published_configs_are_read_for_running(name: str) -> None:
    run = read_spec(load_config(path_of(name)), families=FAMILIES)
    planned = read_spec(load_config(path_of(name)), families=FAMILIES, planning=True)
    assert make_groups(run, CacheDtypes()) == make_groups(planned, CacheDtypes())


def test_plain_linear_attention_keeps_two_sums_in_float32() -> None:
    spec = read("linear_transformer", num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    (group,) = make_groups(spec, CacheDtypes(kv="bfloat16"))
    assert group.bytes_needed(5) == 2 * 4 * (16 * 16 + 16) * 4


def test_delta_nets_are_read_with_what_their_families_do_differently() -> None:
    packed, plain, doubled = (
        kind(read(name), 0) for name in ("qwen3_next", "qwen3_5_text", "olmo_hybrid")
    )
    assert [(k.packed, k.doubled, k.norm_eps) for k in (packed, plain, doubled)] == [
        (True, False, 1e-6),
        (False, False, 1e-6),
        (False, True, 1e-5),
    ]


def test_attention_of_qwen_has_gates_and_turns_a_quarter_of_each_head() -> None:
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        params = kind(read(name), 3).attention
        assert (params.gated, params.qk_norm, params.rope.rotated(params.head_dim)) == (
            True,
            "offset",
            64,
        )


def test_olmo_hybrid_turns_only_what_it_is_given_a_theta_for() -> None:
    assert kind(read("olmo_hybrid"), 3).attention.rope is None
    assert (
        kind(
            read("olmo_hybrid", rope_parameters={"rope_theta": None, "rope_type": "default"}), 3
        ).attention.rope
        is None
    )
    assert (
        kind(read("olmo_hybrid", rope_parameters={"rope_theta": 5e5}), 3).attention.rope.theta
        == 5e5
    )


def test_slopes_of_lightning_fall_from_layer_to_layer_and_head_to_head() -> None:
    spec = read(
        "minimax", num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    layers = [kind(spec, index).slopes for index in (1, 7)]
    expected = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    for slopes, factor in zip(
        layers, (1 - 1 / (7 + 1e-5) + 1e-5, 1 - 7 / (7 + 1e-5) + 1e-5), strict=True
    ):
        torch.testing.assert_close(torch.tensor(slopes), expected * factor)


def test_the_factor_of_embeddings_is_rounded_as_torch_does() -> None:
    for size in (64, 96, 2560, 4096, 5000):
        assert in_bfloat16(size**0.5) == float(torch.tensor(size**0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "minimax_text_01", "hidden_act": "silu"}, "model_type 'minimax_text_01'"),
        ({"model_type": "minimax", "sliding_window": 128}, "sliding_window 128"),
        ({"model_type": "minimax", "head_dim": 128, "rotary_dim": 64}, "rotary_dim 64"),
        ({"model_type": "minimax", "hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"model_type": "kimi_linear", "mla_use_nope": False}, "mla_use_nope False"),
        (
            {"model_type": "kimi_linear", "moe_router_activation_func": "softmax"},
            "moe_router_activation_func 'softmax'",
        ),
        ({"model_type": "recurrent_gemma", "hidden_activation": "tanh"}, "hidden_act 'tanh'"),
        (
            {"model_type": "qwen3_next", "layer_types": ["sliding_attention"] * 48},
            r"layer_types\[0\] 'sliding_attention'",
        ),
        (
            {"model_type": "lfm2", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}},
            "rope_parameters.rope_type",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedError, match=field):
        read_spec(config, families=FAMILIES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "qwen3_next", "linear_num_value_heads": 24},
            "linear_num_value_heads 24 is not a multiple",
        ),
        ({"model_type": "recurrent_gemma", "lru_width": 2561}, "lru_width 2561 is not a multiple"),
        (
            {"model_type": "lfm2", "conv_L_cache": 1, "full_attn_idxs": [1]},
            "conv_L_cache must be a whole number of at least 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(config, families=FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "tensor", "module"),
    [
        (
            "qwen3_5",
            "model.language_model.layers.0.linear_attn.A_log",
            "model.layers.0.linear_attn.A_log",
        ),
        (
            "qwen3_5_moe",
            "model.language_model.layers.0.mlp.shared_expert.up_proj.weight",
            "model.layers.0.mlp.shared_experts.up_proj.weight",
        ),
        ("qwen3_5_moe", "model.visual.blocks.0.attn.qkv.weight", None),
        ("qwen3_next", "mtp.layers.0.mlp.gate.weight", None),
        (
            "qwen3_next",
            "model.layers.1.mlp.shared_expert_gate.weight",
            "model.layers.1.mlp.shared_expert_gate.weight",
        ),
        ("minimax", "model.layers.0.self_attn.slope_rate", None),
        (
            "minimax",
            "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.0.mlp.gate.weight",
        ),
        ("kimi_linear", "model.layers.0.self_attn.A_log", "model.layers.0.self_attn.A_log"),
    ],
)
def test_tensors_are_called_as_in_published_checkpoints(
    model_type: str, tensor: str, module: str | None
) -> None:
    assert FAMILIES.for_model_type(model_type).module_name(tensor) == module
