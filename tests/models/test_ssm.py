"""Families of state space layers: what is read, planned, held, refused, shared, and called in
checkpoints.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from octavo.base import ConfigError, UnsupportedError
from octavo.cache.layout import request_bytes
from octavo.nn.decoder import resolve
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.law import Snapshot
from octavo.spec.stream import CacheDtypes
from tests import tiny, tiny_ssm
from tests.plan.configs import layout_of, model_of, path_of

FAMILIES = find_families()


def read(model_type: str, **config: Any) -> ModelSpec:
    return read_spec({"model_type": model_type, **config}, families=FAMILIES)


def read_tiny(name: str) -> ModelSpec:
    return read_spec({**tiny.BASE, **tiny.SPECS[name]}, families=FAMILIES)


def kinds(spec: ModelSpec, name: str) -> list[Any]:
    return [kind for layer in spec.layers for mixer, kind in layer.mixers if mixer == name]


# -- memory ----------------------------------------------------------------------------------------

STATES = {
    "mamba-2.8b": 64 * (5120 * 3 * 2 + 5120 * 16 * 4),
    "falcon-mamba-7b": 64 * (8192 * 3 * 2 + 8192 * 16 * 4),
    "codestral-mamba-7b": 64 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    "jamba-1.5-mini": 28 * (8192 * 3 * 2 + 8192 * 16 * 4),
    "bamba-9b": 29 * ((8192 + 2 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    "granite-4.0-h-tiny": 36 * ((3072 + 2 * 128) * 3 * 2 + 48 * 64 * 128 * 4),
    "nemotron-h-8b": 24 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    "nemotron-3-nano-30b-a3b": 23 * ((4096 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4),
    "falcon-h1-7b": 44 * ((3072 + 2 * 256) * 3 * 2 + 24 * 128 * 256 * 4),
    "zamba2-7b": 81 * ((7168 + 2 * 2 * 64) * 3 * 2 + 112 * 64 * 64 * 4),
}
"""Bytes of one snapshot of all layers: convolutions in bfloat16, recurrent states in float32."""


@pytest.mark.parametrize("name", STATES)
def test_a_request_holds_one_snapshot_and_its_attention_blocks(name: str) -> None:
    """However long it is; what rounding adds is less than a thousandth of the snapshot, and no
    block more than its tokens.
    """
    model = model_of(name)
    (state,) = (group for group in model.groups if group.law == Snapshot())
    assert {state.bytes_needed(n) for n in (1, 1000, 100_000)} == {STATES[name]}
    layout = layout_of(model, memory=400 * 2**30)
    for tokens in (1, 1000, 4000):
        blocks = [group for group in layout.groups if group.fixed is None]
        attention = sum(
            -(-tokens // g.block_tokens) * g.block_tokens * g.group.bytes_needed(tokens) // tokens
            for g in blocks
        )
        assert (
            0
            <= request_bytes(layout, tokens) - STATES[name] - attention
            <= (STATES[name] + attention) // 1000
        )


@pytest.mark.parametrize("name", tiny_ssm.SPECS)
def test_groups_planned_are_groups_run(name: str) -> None:
    config: dict[str, Any] = {**tiny.BASE, **tiny.SPECS[name]}
    planned = read_spec(config, families=FAMILIES, planning=True)
    assert make_groups(read_tiny(name), "float32") == make_groups(planned, "float32")


@pytest.mark.parametrize("name", STATES)
def test_published_configs_are_read_for_running(name: str) -> None:
    run = read_spec(load_config(path_of(name)), families=FAMILIES)
    planned = read_spec(load_config(path_of(name)), families=FAMILIES, planning=True)
    assert make_groups(run, CacheDtypes()) == make_groups(planned, CacheDtypes())


# -- what is read ----------------------------------------------------------------------------------


def test_time_steps_are_normed_with_weights_in_jamba_and_without_in_falcon_mamba() -> None:
    jamba, falcon, plain = (
        kinds(read(n), m)[0]
        for n, m in (("jamba", "mamba"), ("falcon_mamba", "mixer"), ("mamba", "mixer"))
    )
    assert [(kind.norm, kind.rank) for kind in (jamba, falcon, plain)] == [
        ("scale", 256),
        ("unit", 48),
        (None, 48),
    ]


def test_attention_is_rotated_where_the_family_does() -> None:
    half = kinds(read("bamba", attn_layer_indices=[3]), "self_attn")[0].attention.rope
    assert half.rotated(128) == 64
    assert kinds(read("jamba"), "self_attn")[0].attention.rope is None
    assert kinds(read("nemotron_h"), "mixer")[1].attention.rope is None
    granite = {"num_hidden_layers": 1, "layer_types": ["attention"]}
    for kind, rotated in (("rope", True), ("nope", False), (None, False)):
        spec = read("granitemoehybrid", position_embedding_type=kind, **granite)
        assert (kinds(spec, "self_attn")[0].attention.rope is not None) == rotated
    for rotates in (True, False):
        spec = read("zamba2", use_mem_rope=rotates)
        assert (
            kinds(spec, "shared_transformer.self_attn")[0].attention.rope is not None
        ) == rotates


def test_scores_have_the_factor_that_the_family_gives_them() -> None:
    def scale(spec: ModelSpec, name: str = "self_attn") -> float:
        return float(kinds(spec, name)[0].attention.scale)

    assert scale(
        read("granitemoehybrid", layer_types=["attention"] * 32, attention_multiplier=0.015)
    ) == pytest.approx(0.015)
    assert scale(read("falcon_h1", head_dim=64, key_multiplier=0.39)) == pytest.approx(0.39 / 8)
    assert scale(read("zamba2"), "shared_transformer.self_attn") == pytest.approx(
        (2 * 2560 / 32 / 2) ** -0.5
    )


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (None, (0.0, inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, inf)),
        ([0, None], (0.0, inf)),
        ([0.001, 0.1], (0.001, 0.1)),
    ],
)
@pytest.mark.parametrize("model_type", ["mamba2", "bamba", "nemotron_h"])
def test_time_steps_are_limited_as_the_config_says(
    model_type: str, given: Any, limit: tuple[float, float]
) -> None:
    spec = read(model_type, time_step_limit=given, time_step_min=0.01, time_step_max=0.2)
    assert spec.layers[0].mixers[0][1].dt_limit == limit  # type: ignore[attr-defined]


def test_heads_of_falcon_h1_divide_its_own_inner_size() -> None:
    kind = kinds(read("falcon_h1", mamba_d_ssm=1536, mamba_n_heads=24), "mamba")[0]
    assert (kind.head_dim, kind.inner_size) == (64, 1536)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "mamba", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "bamba", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "nemotron_h", "mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ({"model_type": "nemotron_h", "mlp_bias": True}, "mlp_bias True"),
        ({"model_type": "nemotron_h", "sliding_window": 512}, "sliding_window 512"),
        ({"model_type": "zamba2", "use_long_context": True}, "use_long_context True"),
        ({"model_type": "zamba2", "add_bias_linear": True}, "add_bias_linear True"),
        (
            {
                "model_type": "zamba2",
                "use_shared_attention_adapter": True,
                "num_key_value_heads": 8,
            },
            "num_key_value_heads 8",
        ),
        (
            {"model_type": "granitemoehybrid", "attention_multiplier": 0.0},
            "attention_multiplier 0.0",
        ),
        (
            {"model_type": "jamba", "quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config",
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
            {"model_type": "bamba", "mamba_n_groups": 3},
            "mamba_n_heads 128 is not a multiple of mamba_n_groups 3",
        ),
        ({"model_type": "falcon_h1", "mamba_n_heads": 100}, "mamba_n_heads 100 does not divide"),
        (
            {"model_type": "falcon_h1", "ssm_multipliers": [1.0]},
            "ssm_multipliers must be five numbers",
        ),
        ({"model_type": "mamba2", "time_step_limit": [0.1, 0.01]}, "time_step_limit"),
        ({"model_type": "mamba2", "time_step_limit": 0.1}, "time_step_limit must be two numbers"),
        ({"model_type": "zamba2", "num_mem_blocks": 0}, "num_mem_blocks"),
        (
            {"model_type": "mamba", "conv_kernel": 1},
            "conv_kernel must be a whole number of at least 2",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(config, families=FAMILIES)


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "tensor", "module"),
    [
        ("mamba", "backbone.embedding.weight", "model.embed_tokens.weight"),
        ("mamba2", "backbone.layers.3.mixer.dt_bias", "model.layers.3.mixer.dt_bias"),
        ("nemotron_h", "backbone.norm_f.weight", "model.norm.weight"),
        (
            "nemotron_h",
            "backbone.layers.1.mixer.gate.e_score_correction_bias",
            "model.layers.1.mixer.gate.e_score_correction_bias",
        ),
        ("nemotron_h", "mtp.layers.0.norm.weight", None),
        ("jamba", "model.layers.1.feed_forward.router.weight", "model.layers.1.mlp.gate.weight"),
        (
            "jamba",
            "model.layers.1.pre_ff_layernorm.weight",
            "model.layers.1.post_attention_layernorm.weight",
        ),
        (
            "granitemoehybrid",
            "model.layers.0.block_sparse_moe.router.layer.weight",
            "model.layers.0.mlp.gate.weight",
        ),
        ("zamba2", "model.layers.6.mamba_decoder.mamba.D", "model.layers.6.mamba.D"),
        (
            "zamba2",
            "model.layers.6.shared_transformer.self_attn.linear_q_adapter_list.2.0.weight",
            "model.layers.6.shared_transformer.self_attn.q_proj.adapters.2.0.weight",
        ),
    ],
)
def test_tensors_are_called_as_in_published_checkpoints(
    model_type: str, tensor: str, module: str | None
) -> None:
    assert FAMILIES.for_model_type(model_type).module_name(tensor) == module


def test_layers_of_zamba2_share_weights_and_have_adapters_of_their_own() -> None:
    spec = read_tiny("zamba2")
    model = resolve(FAMILIES.named("zamba2").module)(spec, dtype=torch.float32, device="meta")
    first, second, third = (model.model.layers[index].shared_transformer for index in (0, 2, 3))
    assert (
        third.self_attn.q_proj.base
        is first.self_attn.q_proj.base
        is not second.self_attn.q_proj.base
    )
    assert (
        third.self_attn.o_proj is first.self_attn.o_proj
        and third.feed_forward.down_proj is first.feed_forward.down_proj
    )
    assert [sorted(block.feed_forward.gate_up_proj.adapters) for block in (first, second)] == [
        ["0", "2"],
        ["1"],
    ]
    assert [block.feed_forward.gate_up_proj.use for block in (first, second, third)] == [0, 1, 2]
    repeated = {
        name for name in model.tied if name.startswith("model.layers.3.shared_transformer.")
    }
    assert repeated and not any(name.startswith("model.layers.2") for name in model.tied)
    assert not repeated & {name for name, _ in model.named_parameters()}


def test_states_and_what_decides_them_stay_wide_in_narrow_models() -> None:
    for name in ("mamba", "mamba2"):
        spec = read_tiny(name)
        model = resolve(FAMILIES.named(spec.family).module)(
            spec, dtype=torch.bfloat16, device="meta"
        )
        mixer = model.model.layers[0].mixer
        assert {mixer.A_log.dtype, mixer.D.dtype} == {
            torch.float32
        } and mixer.in_proj.weight.dtype == torch.bfloat16
        (stream,) = spec.layers[0].mixers[0][1].streams(CacheDtypes(kv="bfloat16"))
        dtypes = {field.name.partition("_")[0]: field.dtype for field in stream.fields}
        assert dtypes == {"conv": "bfloat16", "recurrent": "float32"}
