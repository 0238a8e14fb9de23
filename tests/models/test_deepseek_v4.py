"""DeepSeek-V4: schedules, rotations, experts and groups by config; three spellings of its tensors;
logits by Transformers.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base import UnsupportedError
from octavo.nn.hyper import HyperDecoder
from octavo.runner.runner import Runner
from octavo.runner.weights import fill, safetensors_weights
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, load_config, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.rope import RopeParams
from tests import tiny, tiny_compressed
from tests.runner.plans import Chunk, PlanMaker, hand_layout

FAMILIES = find_families()
FAMILY = FAMILIES.named("deepseek_v4")
DATA = Path(__file__).resolve().parent.parent / "data" / "configs"
SCALING = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}


def read(**config: Any) -> ModelSpec:
    given = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128, 0],
        **config,
    }
    return read_spec(given, families=FAMILIES)


def load(path: Path) -> dict[str, torch.Tensor]:
    model = HyperDecoder(
        read_spec(load_config(path), families=FAMILIES), dtype=torch.float32, device="meta"
    )
    fill(model, safetensors_weights(path, FAMILY), family=FAMILY, device=torch.device("cpu"))
    return dict(model.named_parameters())


def official(name: str) -> str:
    """A name that Transformers writes, as DeepSeek's checkpoints have it."""
    name = (
        re.sub(r"^model\.hc_head\.hc_", "hc_head_", name)
        .removeprefix("model.")
        .replace("embed_tokens", "embed")
    )
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def test_three_spellings_of_names_are_the_same_weights(tmp_path: Path) -> None:
    path = tiny.write("deepseek_v4", tmp_path)
    file = path / "model.safetensors"
    written, native = load_file(file), tiny.build("deepseek_v4").state_dict()
    right = load(path)
    assert any(name.endswith("attn.indexer.compressor.ape") for name in written)
    save_file({name: tensor.contiguous() for name, tensor in native.items()}, file)
    theirs = load(path)
    drafts = {"mtp.0.attn.wkv.weight": torch.zeros(2, 2), "mtp.0.e_proj.weight": torch.zeros(1)}
    save_file({**{official(name): tensor for name, tensor in written.items()}, **drafts}, file)
    published = load(path)
    for name, weight in right.items():
        assert torch.equal(weight, theirs[name]) and torch.equal(weight, published[name]), name
        assert torch.equal(weight, native[name].to(weight.dtype)), name


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("deepseek_v4", (0, 3, *range(4, 21), 40, *range(63, 70))),
        ("deepseek_v4_mixed", (0, 1, 2, 3, 4, 11, *range(15, 19), 60)),
        ("deepseek_v4_r128", (0, 100, *range(126, 131), 250, *range(255, 259))),
    ],
)
def test_logits_are_those_of_transformers(name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    path, ids = tiny.write(name, tmp_path), tiny.prompt(cuts[-1], 3)
    spec = read_spec(load_config(path), families=FAMILIES)
    weights = safetensors_weights(path, FAMILY)
    runner = Runner(
        spec=spec,
        family=FAMILY,
        layout=hand_layout(spec, (16, 8)),
        weights=weights,
        dtype=torch.float32,
    )
    # Bytes nobody has written are NaN: reading one shows.
    runner.arena.buffer.fill_(0xFF)
    maker, right = PlanMaker(runner.layout, 1), tiny.logits(name, ids)
    for start, stop in pairwise(cuts):
        found = runner.logits(maker.plan([Chunk(0, ids[start:stop])]))
        assert (found[0] - right[stop - 1]).abs().max() < 5e-5, stop


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    path, ids = tiny.write("deepseek_v4", tmp_path), tiny.prompt(61, 61)
    spec = read_spec(load_config(path), families=FAMILIES)
    layout, weights = (
        hand_layout(spec, (16, 8), dtype="bfloat16"),
        safetensors_weights(path, FAMILY),
    )
    runner = Runner(spec=spec, family=FAMILY, layout=layout, weights=weights, dtype=torch.bfloat16)
    right = tiny.logits("deepseek_v4", ids)[-1]
    found = runner.logits(PlanMaker(layout, 1).plan([Chunk(0, ids)]))[0]
    assert (found - right).abs().max() < 0.15 * right.std()


def test_layers_are_those_of_the_ratios() -> None:
    for name, sparse, heavy in (("flash", 21, 20), ("pro", 30, 31)):
        spec = read_spec(load_config(DATA / f"deepseek-v4-{name}.json"), families=FAMILIES)
        kinds = [layer.mixers[0][1].name for layer in spec.layers]
        assert (kinds.count("v4_csa"), kinds.count("v4_hca")) == (sparse, heavy)
        assert (spec.options["hashed"].layers, len(spec.options["moe"].layers)) == (
            (0, 1, 2),
            len(kinds),
        )


def test_groups_and_hash_units() -> None:
    """Entries of both ratios and index keys share a table, and a hash unit is a logical block of
    256 tokens.
    """
    spec = read_spec(load_config(DATA / "deepseek-v4-flash.json"), families=FAMILIES)
    groups = make_groups(spec, "bfloat16")
    assert [group.law.describe() for group in groups] == [
        "window 128",
        "everything",
        "tail 4+4",
        "tail 128+0",
    ]
    assert {member.stream.name for member in groups[1].members} == {"compressed", "index"}
    assert (groups[1].stride, len(groups[1].layers), spec.hash_unit) == (128, 41, 256)
    ratios = {tiny_compressed.SPARSE: 4, tiny_compressed.HEAVY: 16}
    types = [tiny_compressed.SPARSE, tiny_compressed.HEAVY, tiny_compressed.WINDOW]
    assert read(layer_types=types, compress_rates=ratios).hash_unit == 32
    assert read(compress_ratios=[0, 0, 0]).hash_unit == 16


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": SCALING},
        {"rope_parameters": {**SCALING, "rope_type": "yarn"}},
        {
            "rope_parameters": {
                "main": {"rope_theta": 1e4, "partial_rotary_factor": 0.125},
                "compress": {**SCALING, "rope_theta": 1.6e5, "attention_factor": 1.0},
            }
        },
    ],
    ids=["published", "flat", "by layer type"],
)
def test_layers_with_a_compressor_are_scaled_and_others_are_not(given: dict[str, Any]) -> None:
    ropes = [layer.mixers[0][1].attention.rope for layer in read(**given).layers]  # type: ignore[attr-defined]
    scaled = RopeParams(
        theta=160000.0,
        rope_type="yarn",
        factor=16,
        original_max_position_embeddings=65536,
        attention_factor=1.0,
        interleaved=True,
    )
    assert ropes == [RopeParams(theta=10000.0, interleaved=True), scaled, scaled]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
    ],
)
def test_what_does_not_run_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        read(**config)
