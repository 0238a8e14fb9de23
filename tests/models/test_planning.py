"""Configs read for planning: what keeps a model from running does not keep it from being planned;
what is wrong is named.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.base import ConfigError, OctavoError, UnsupportedError
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.law import Chunk, Everything, Snapshot, Tail, Window
from octavo.spec.stream import CacheDtypes

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
FAMILIES = find_families()
F, S, L = "full_attention", "sliding_attention", "linear_attention"


def plan(config: dict[str, Any]) -> ModelSpec:
    return read_spec(config, families=FAMILIES, planning=True)


def plan_file(name: str, **changes: Any) -> ModelSpec:
    config = load_config(CONFIGS / f"{name}.json")
    inner = (
        {"text_config": {**config["text_config"], **changes}}
        if "text_config" in config
        else changes
    )
    return plan({**config, **inner})


def names(spec: ModelSpec) -> list[str]:
    return ["+".join(kind.name for _, kind in layer.mixers) for layer in spec.layers]


# -- planned but not run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unusual",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "relu2"},
        {"rope_interleaved": True},
    ],
)
def test_what_cannot_be_run_can_be_planned(unusual: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        read_spec({"model_type": "llama", **unusual}, families=FAMILIES)
    assert plan({"model_type": "llama", **unusual}).layers == plan({"model_type": "llama"}).layers


def test_a_spec_for_planning_says_nothing_of_computing() -> None:
    spec = plan({"model_type": "llama"})
    assert spec.options == {} and spec.parameters is not None
    assert all(kind.attention.rope is None for layer in spec.layers for _, kind in layer.mixers)  # type: ignore[attr-defined]
    runnable = read_spec({"model_type": "llama"}, families=FAMILIES)
    assert runnable.options and runnable.parameters is None


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES.families if f.module is None], ids=lambda family: family.name
)
def test_a_family_without_a_module_is_refused_for_running_by_name(family: Any) -> None:
    for model_type in family.model_types:
        with pytest.raises(
            UnsupportedError, match=f"model_type '{model_type}' can be planned but not run yet"
        ):
            read_spec({"model_type": model_type}, families=FAMILIES)


def test_sizes_left_to_the_class_are_told() -> None:
    assert plan_file("gemma-3-4b").assumed["num_attention_heads"] == 8
    assert "hidden_size" not in plan_file("gemma-3-4b").assumed
    assert plan_file("granite-4.0-h-tiny").assumed["intermediate_size"] == 11008
    assert plan_file("llama-3.1-8b").assumed == {}


def test_planning_every_config_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    code += (
        "from pathlib import Path; from octavo.spec.hf import find_families, load_config,"
        " read_spec\n"
    )
    code += "families = find_families()\n"
    code += f"for path in sorted(Path({str(CONFIGS)!r}).glob('[a-z]*.json')):\n"
    code += (
        "    print(path.stem, len(read_spec(load_config(path), families=families,"
        " planning=True).layers))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deepseek-v4-pro 61" in done.stdout.splitlines()


# -- traps -----------------------------------------------------------------------------------------


def test_a_window_beyond_the_context_costs_what_full_attention_does() -> None:
    (windowed,) = make_groups(plan_file("phi-4-mini"), CacheDtypes())
    (full,) = make_groups(plan_file("phi-4-mini", sliding_window=None), CacheDtypes())
    assert (windowed.law, full.law) == (Window(262144), Everything())
    for tokens in (1, 1000, 131072):
        assert windowed.bytes_needed(tokens) == full.bytes_needed(tokens)


def test_v4_rates_other_than_those_of_checkpoints() -> None:
    types = [S, "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    spec = plan(
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": 3,
            "layer_types": types,
            "compress_rates": rates,
        }
    )
    assert names(spec) == ["v4_window", "v4_csa", "v4_hca"]
    laws = {group.law for group in make_groups(spec, CacheDtypes())}
    assert laws == {Window(128), Everything(), Tail(4, 4), Tail(16)}
    (growing,) = [group for group in make_groups(spec, CacheDtypes()) if group.law == Everything()]
    assert growing.stride == 16


def test_a_layer_that_shares_reads_the_last_of_its_type() -> None:
    spec = plan_file("gemma-3n-e4b")
    assert [layer.shares for layer in spec.layers[:20]] == [None] * 20
    assert [layer.shares for layer in spec.layers[20:25]] == [18, 18, 18, 18, 19]
    groups = make_groups(spec, CacheDtypes())
    assert {group.law: len(group.layers) for group in groups} == {Window(512): 16, Everything(): 4}


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared", "full"]}, [0, 2]),
        ({"index_topk_pattern": "FSSF"}, [0, 3]),
        ({"index_topk_freq": 2}, [0, 1, 3]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_spellings_of_which_layers_have_an_indexer(given: dict[str, Any], full: list[int]) -> None:
    spec = plan({"model_type": "glm_moe_dsa", "num_hidden_layers": 4, **given})
    (group,) = make_groups(spec, CacheDtypes())
    assert sorted(member.layer for member in group.members if member.stream.name == "index") == full
    assert group.layers == (0, 1, 2, 3)


def test_spellings_of_which_layer_is_which() -> None:
    exaone = {"model_type": "exaone4", "num_hidden_layers": 6, "sliding_window": 8}
    assert (
        names(plan({**exaone, "sliding_window_pattern": "LLG"}))
        == ["sliding", "sliding", "full"] * 2
    )
    assert names(plan({**exaone, "sliding_window_pattern": "LLLG"}))[-1] == "full"
    assert names(plan({**exaone, "sliding_window": None})) == ["full"] * 6
    smol = {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
    }
    assert names(plan(smol)) == ["full", "full", "full", "sliding"]
    old = {"model_type": "minimax_text_01", "num_hidden_layers": 3, "attn_type_list": [0, 0, 1]}
    assert names(plan(old)) == ["lightning", "lightning", "full"]
    assert (
        names(
            plan(
                {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": None}
            )
        )
        == ["full"] * 4
    )
    llama4 = plan({"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 7})
    assert {group.law for group in make_groups(llama4, CacheDtypes())} == {Chunk(7), Everything()}
    granite = {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "mamba_d_state": 8}
    assert names(plan({**granite, "layer_types": ["mamba", "attention"]})) == names(
        plan({**granite, "layer_types": [L, F]})
    )


def test_two_mixers_of_a_layer_are_two_members() -> None:
    groups = make_groups(plan_file("falcon-h1-7b"), CacheDtypes())
    assert {group.law: len(group.members) for group in groups} == {Everything(): 44, Snapshot(): 44}
    assert {member.mixer for group in groups for member in group.members} == {"self_attn", "mamba"}


def test_blocks_with_shared_weights_have_caches_of_their_own() -> None:
    groups = {group.law: group for group in make_groups(plan_file("zamba2-7b"), CacheDtypes())}
    assert len(groups[Everything()].members) == 13 and len(groups[Snapshot()].members) == 81


# -- what is wrong ---------------------------------------------------------------------------------

SHORT = [F, F]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        (
            "qwen3.5-9b",
            {"layer_types": SHORT},
            "layer_types names 2 layers, num_hidden_layers says 32",
        ),
        ("gemma-4-e4b", {"layer_types": SHORT}, "layer_types names 2 layers"),
        ("gpt-oss-20b", {"layer_types": "full"}, "layer_types must be a list"),
        (
            "gpt-oss-20b",
            {"sliding_window": 0},
            "sliding_window must be a whole number of at least 1, not 0",
        ),
        ("mistral-7b-v0.1", {"sliding_window": 0}, "sliding_window"),
        ("mistral-7b-v0.1", {"sliding_window": 4096.5}, "sliding_window"),
        ("recurrentgemma-2b", {"attention_window_size": 0}, "sliding_window"),
        ("llama-4-scout", {"attention_chunk_size": 0}, "attention_chunk_size"),
        ("deepseek-v4-pro", {"sliding_window": 0}, "sliding_window"),
        (
            "deepseek-v4-pro",
            {"compress_ratios": [0, 4]},
            "layer_types names 2 layers, num_hidden_layers says 61",
        ),
        (
            "deepseek-v4-pro",
            {"compress_ratios": [8] * 62},
            "compress_ratios must be a list of 0, 4, 128",
        ),
        (
            "deepseek-v4-pro",
            {"qk_rope_head_dim": 512},
            "qk_rope_head_dim 512 must be less than head_dim 512",
        ),
        ("glm-5.2", {"indexer_types": ["full"]}, "indexer_types names 1 layers"),
        ("glm-5.2", {"indexer_types": ["half"] * 78}, "indexer_types[0] 'half'"),
        ("glm-5.2", {"indexer_types": ["shared"] * 78}, "indexer_types[0] is shared"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("gemma-3n-e4b", {"num_kv_shared_layers": 36}, "num_kv_shared_layers 36"),
        ("gemma-3n-e4b", {"num_kv_shared_layers": 33}, "no full_attention layer before it"),
        ("llama-3.1-8b", {"num_key_value_heads": 7}, "num_key_value_heads 7"),
        (
            "bamba-9b",
            {"mamba_n_groups": 3},
            "mamba_n_heads 128 is not a multiple of mamba_n_groups 3",
        ),
        (
            "bamba-9b",
            {"mamba_d_head": "auto", "mamba_n_heads": 100},
            "mamba_n_heads 100 does not divide",
        ),
        ("bamba-9b", {"mamba_d_conv": 1}, "mamba_d_conv"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 0}, "full_attention"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M*"}, "layer_types names 2 layers"),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [4]}},
            "layer 3",
        ),
        ("mamba-2.8b", {"state_size": -16}, "state_size"),
        ("mamba-2.8b", {"vocab_size": None}, "vocab_size"),
        ("jamba-1.5-mini", {"attn_layer_period": 0}, "attn_layer_period"),
    ],
)
def test_wrong_values_are_named(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_file(name, **changes)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        (
            "gpt-oss-20b",
            {"layer_types": ["sparse"] * 24},
            "layer_types[0] 'sparse' is not supported; supported: ",
        ),
        ("llama-4-scout", {"layer_types": [S] * 48}, "layer_types[0] 'sliding_attention'"),
        (
            "deepseek-v4-pro",
            {"compress_ratios": None},
            "compress_ratios and layer_types are missing",
        ),
        (
            "llama-3.1-8b",
            {"model_type": "mystery"},
            "model_type 'mystery' is not supported: no family",
        ),
    ],
)
def test_what_is_unknown_is_never_taken_for_something_else(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_file(name, **changes)
    assert named in str(caught.value)


@pytest.mark.parametrize("value", [None, 0, -1, "many", 2.5, [], {}, 10**30])
def test_no_value_of_any_field_is_a_surprise(value: object) -> None:
    """Whatever stands in a field, the answer is a spec or an error that octavo raises on
    purpose.
    """
    for path in sorted(CONFIGS.glob("[a-z]*.json")):
        config = load_config(path)
        text = config.get("text_config", config)
        for field in text:
            try:
                plan_file(path.stem, **{field: value})
            except OctavoError as error:
                assert "\n" not in str(error)
