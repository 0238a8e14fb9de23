"""DeepSeek's and GLM's latent attention in whole models: logits, continuations, what is kept, and
what is refused.

That greedy output equals Transformers' however the work is cut is
``tests/engine/test_equivalence.py``'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.base import ConfigError, UnsupportedError
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.stream import CacheDtypes
from tests import tiny, tiny_latent
from tests.runner.plans import Chunk, PlanMaker
from tests.runner.test_runner import make_runner

FAMILIES = find_families()
SPARSE = ("deepseek_v32", "deepseek_v32_narrow", "glm_moe_dsa", "glm_moe_dsa_wide")


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**tiny.BASE, **tiny_latent.SPECS[name], **changes}


def engine(path: Path, **options: object) -> LLM:
    given: dict[str, object] = {
        "kv_memory": "32MiB",
        "max_model_len": 512,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    return LLM(path, dtype="float32", **{**given, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", tiny_latent.SPECS)
@pytest.mark.parametrize("budget", [150, 23])
def test_logits_are_those_of_transformers(name: str, budget: int, tmp_path: Path) -> None:
    runner, ids = make_runner(name, tmp_path, (16, 8)), tiny.prompt(150, 11)
    maker, made = PlanMaker(runner.layout, 1), []
    expected = tiny.logits(name, ids)
    for first in range(0, len(ids), budget):
        part = ids[first : first + budget]
        made.append((first + len(part) - 1, runner.logits(maker.plan([Chunk(0, part)]))[0]))
    for place, logits in made:
        assert (logits - expected[place]).abs().max() < 5e-5


@pytest.mark.parametrize("name", tiny_latent.SPECS)
def test_weights_are_counted_exactly(name: str) -> None:
    expected = sum(weight.numel() for weight in tiny.build(name).parameters())
    assert read_spec(config(name), families=FAMILIES, planning=True).parameters == expected


PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "seq_aux": True,
    },
    "deepseek-v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "ep_size": 1,
    },
    "deepseek-v3.2": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "kimi-k2": {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "seq_aux": True},
    "glm-5": {"rope_interleave": True, "indexer_rope_interleave": True, "rope_scaling": None},
}
"""What the published files say beyond those of ``tests/data/configs``, which are for planning."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_not_refused(name: str) -> None:
    rope = {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }
    scaled = {
        "rope_scaling": {**rope, "mscale": 0.707, "mscale_all_dim": 0.707},
        "moe_layer_freq": 1,
    }
    path = Path(__file__).resolve().parent.parent / "data" / "configs" / f"{name}.json"
    spec = read_spec({**load_config(path), **scaled, **PUBLISHED[name]}, families=FAMILIES)
    dense = 1 if name in ("deepseek-v2-lite", "kimi-k2") else 3
    assert spec.options["moe"].layers == tuple(range(dense, len(spec.layers)))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32_narrow", "glm_moe_dsa"])
def test_continuations_of_one_prompt_are_those_of_requests_alone(name: str, tmp_path: Path) -> None:
    llm, prompt = engine(tiny.write(name, tmp_path)), tiny.prompt(45, 5)
    together = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=2)
    (forked,) = llm.generate([prompt], together, progress=False)
    branches = [output.token_ids for output in forked.outputs]
    assert branches[0] != branches[1]
    for tokens in branches:
        for made in (3, 11):
            (again,) = llm.generate(
                [prompt + tokens[:made]],
                SamplingParams(temperature=0, max_tokens=1),
                progress=False,
            )
            best = tiny.logits(name, prompt + tokens[:made])[-1].argmax()
            assert again.outputs[0].token_ids == [int(best)]


@pytest.mark.parametrize("name", SPARSE)
def test_a_choice_of_everything_is_dense_attention(name: str, tmp_path: Path) -> None:
    """While no context is longer than top-k, outputs equal those of the same weights without any
    indexer, bit by bit.
    """
    path = tiny.write(name, tmp_path)
    weights = load_file(path / "model.safetensors")
    given = {**json.loads((path / "config.json").read_text()), "index_topk": 64}
    for model_type, directory in ((given["model_type"], "sparse"), ("deepseek_v3", "dense")):
        kept = {
            key: value
            for key, value in weights.items()
            if directory == "sparse" or ".indexer." not in key
        }
        skipped = {"mlp_layer_types", "layer_types"} if directory == "dense" else set()
        target = tmp_path / directory
        target.mkdir()
        save_file(kept, target / "model.safetensors")
        changed = {
            **{key: value for key, value in given.items() if key not in skipped},
            "model_type": model_type,
        }
        changed.pop("architectures")
        (target / "config.json").write_text(json.dumps(changed))
    prompts = [tiny.prompt(length, length) for length in (40, 7, 1)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    found = [
        engine(tmp_path / directory, max_num_batched_tokens=19).generate(
            prompts, params, progress=False
        )
        for directory in ("sparse", "dense")
    ]
    for sparse, dense in zip(*found, strict=True):
        assert sparse.outputs[0].token_ids == dense.outputs[0].token_ids
        assert sparse.outputs[0].logprobs == dense.outputs[0].logprobs


def test_layers_for_drafting_are_left_out(tmp_path: Path) -> None:
    path = tiny.write("deepseek_v3", tmp_path)
    expected = engine(path).generate(
        [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8), progress=False
    )
    weights = load_file(path / "model.safetensors")
    extra = {
        key.replace("layers.3.", "layers.4."): value.clone()
        for key, value in weights.items()
        if "layers.3." in key
    }
    save_file(
        {**weights, **extra, "model.layers.4.eh_proj.weight": torch.ones(2, 2)},
        path / "model.safetensors",
    )
    found = engine(path).generate(
        [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8), progress=False
    )
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_layers_that_share_a_choice_keep_no_index_keys() -> None:
    spec = read_spec(config("glm_moe_dsa"), families=FAMILIES)
    names = [
        [stream.name for stream in layer.mixers[0][1].streams(CacheDtypes())]
        for layer in spec.layers
    ]
    own, shared = ["latent", "index"], ["latent"]
    assert names == [own, own, shared, own, shared, shared]


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    given = config("deepseek_v3", num_nextn_predict_layers=0)
    kimi = read_spec({**given, "model_type": "kimi_k2"}, families=FAMILIES)
    assert kimi == read_spec(given, families=FAMILIES)


def scale(rope: dict[str, Any]) -> float:
    spec = read_spec(config("deepseek_v3", rope_parameters=rope), families=FAMILIES)
    return float(spec.layers[0].mixers[0][1].latent.scale)  # type: ignore[attr-defined]


def test_yarn_scales_scores_by_its_magnitude_squared() -> None:
    """V3's own numbers: 0.1 * ln(40) + 1 = 1.3689."""
    plain = scale({"rope_theta": 10000.0, "rope_type": "default"})
    yarn = {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
    }
    assert plain == pytest.approx(24**-0.5)
    assert scale({**yarn, "mscale_all_dim": 1.0}) == pytest.approx(plain * 1.36889**2, rel=1e-5)
    assert scale(yarn) == plain
    assert scale({**yarn, "mscale_all_dim": 1.0, "factor": 1.0}) == plain


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("deepseek_v2_groups", {"topk_group": 5}, "topk_group 5"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        ("deepseek_v32", {"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave True"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim 4"),
        ("glm_moe_dsa", {"rope_interleave": False}, "rope_interleave False"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 6}, "indexer_types"),
    ],
)
def test_what_no_such_model_has_is_refused_by_name(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=named):
        read_spec(config(name, **changes), families=FAMILIES)
