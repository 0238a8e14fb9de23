"""Weights that checkpoints hold fused, one expert at a time or transposed arrive where they belong;
misfits are named.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.base import ConfigError
from octavo.nn.decoder import Decoder
from octavo.runner.repack import pieces
from octavo.runner.weights import fill, safetensors_weights
from octavo.spec.family import Family, Repack
from octavo.spec.hf import find_families, load_config, read_spec
from tests import tiny

CPU = torch.device("cpu")
SPLIT = Repack(pattern=r"qkv\.weight", into=("q.weight", "k.weight", "v.weight"))
GATE = Repack(pattern=r"experts\.(\d+)\.gate\.weight", into=("both",), index=r"\1", half=0)
UP = Repack(pattern=r"experts\.(\d+)\.up\.weight", into=("both",), index=r"\1", half=1)


class Model(nn.Module):
    """Weights of given shapes on the meta device; ``q`` is float32 whatever the rest is."""

    tied = MappingProxyType[str, str]({})
    unused = frozenset[str]()

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            owner = nn.Module() if name in "qkv" else self
            if owner is not self:
                self.add_module(name, owner)
            dtype = torch.float32 if name in ("q", "both") else torch.bfloat16
            values = nn.Parameter(
                torch.empty(shape, device="meta", dtype=dtype), requires_grad=False
            )
            owner.register_parameter("weight" if owner is not self else name, values)


def load(model: Model, weights: dict[str, Tensor], *rules: Repack) -> dict[str, Tensor]:
    family = Family(name="x", model_types=("x",), normalize=dict, layers=lambda _: (), repack=rules)
    fill(model, weights.items(), family=family, device=CPU)  # type: ignore[arg-type]
    return dict(model.named_parameters())


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_rows_are_split_by_the_sizes_of_the_modules() -> None:
    fused = numbered(8, 3)
    made = load(Model(q=(4, 3), k=(2, 3), v=(2, 3)), {"qkv.weight": fused}, SPLIT)
    assert torch.equal(torch.cat([made[f"{name}.weight"].float() for name in "qkv"]), fused)
    assert (made["q.weight"].dtype, made["k.weight"].dtype) == (torch.float32, torch.bfloat16)


PARTS = tuple(
    Repack(pattern=rf"{name}_conv\.weight", into=("q.weight",), part=part)
    for name, part in (("a", 0), ("b", 1), ("c", -1))
)


def test_parts_of_a_weight_lie_behind_each_other_the_last_at_its_end() -> None:
    whole = numbered(10, 3)
    parts = {"c_conv.weight": whole[8:], "a_conv.weight": whole[:4], "b_conv.weight": whole[4:8]}
    assert torch.equal(load(Model(q=(10, 3)), parts, *PARTS)["q.weight"], whole)


def test_parts_that_overlap_leave_a_gap_or_do_not_fit_are_named() -> None:
    whole = numbered(10, 3)
    parts = {"a_conv.weight": whole[:4], "b_conv.weight": whole[4:8]}
    with pytest.raises(ConfigError, match=r"lacks q\.weight"):
        load(Model(q=(10, 3)), {**parts, "c_conv.weight": whole[9:]}, *PARTS)
    with pytest.raises(ConfigError, match=r"c_conv\.weight is twice"):
        load(Model(q=(10, 3)), {**parts, "c_conv.weight": whole[7:]}, *PARTS)
    with pytest.raises(
        ConfigError, match=r"c_conv\.weight has 11 rows, which do not fit q\.weight of 10"
    ):
        load(Model(q=(10, 3)), {"c_conv.weight": numbered(11, 3)}, *PARTS)


def test_experts_are_stacked_gate_before_up() -> None:
    weights = {
        f"experts.{n}.{part}.weight": numbered(2, 3) + 100 * n + at
        for n in (1, 0)
        for at, part in ((10, "up"), (0, "gate"))
    }
    made = load(Model(both=(2, 4, 3)), weights, GATE, UP)["both"]
    for n in range(2):
        assert torch.equal(made[n, :2], weights[f"experts.{n}.gate.weight"])
        assert torch.equal(made[n, 2:], weights[f"experts.{n}.up.weight"])


@pytest.mark.parametrize("interleaved", [False, True])
def test_stacks_may_be_transposed_and_their_halves_interleaved(interleaved: bool) -> None:
    rule = Repack(
        pattern="stored", into=("both",), axis=1, transposed=True, interleaved=interleaved
    )
    stored = numbered(2, 3, 4)
    made = load(Model(both=(2, 4, 3)), {"stored": stored}, rule)["both"]
    order = [0, 2, 1, 3] if interleaved else [0, 1, 2, 3]
    assert torch.equal(made, stored[:, :, order].transpose(1, 2)) and made.is_contiguous()


def test_halves_of_whole_stacks() -> None:
    rules = [
        Repack(pattern=name, into=("both",), axis=1, half=half)
        for half, name in enumerate(("gate", "up"))
    ]
    made = load(
        Model(both=(2, 4, 3)), {"gate": numbered(2, 2, 3), "up": -numbered(2, 2, 3)}, *rules
    )["both"]
    assert torch.equal(made[:, :2], numbered(2, 2, 3)) and torch.equal(
        made[:, 2:], -numbered(2, 2, 3)
    )


def test_the_first_rule_decides_and_the_rest_keep_their_names() -> None:
    shapes = {"both": torch.Size((1, 2))}
    rules = (Repack(pattern="a", into=("both",)), Repack(pattern="a", into=("other",)))
    assert [piece.weight for piece in pieces("a", torch.zeros(1, 2), rules, shapes)] == ["both"]
    assert [piece.weight for piece in pieces("b", torch.zeros(1, 2), rules, shapes)] == ["b"]


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"qkv.weight": (7, 3)}, r"qkv\.weight has shape \(7, 3\), the config asks for 8 rows"),
        ({"qkv.weight": (8, 2)}, r"qkv\.weight has shape"),
        ({"qkv.weight": (8, 3), "q.weight": (4, 3)}, r"q\.weight is twice"),
        ({"qkv.weight": (8, 3), "experts.0.gate.weight": (2, 3)}, "lacks both"),
        (
            {"qkv.weight": (8, 3), "experts.2.gate.weight": (2, 3)},
            r"experts\.2\.gate\.weight .* has no place",
        ),
        (
            {"qkv.weight": (8, 3), "experts.1.gate.weight": (3, 3)},
            r"experts\.1\.gate\.weight has shape",
        ),
    ],
)
def test_misfits_are_named(weights: dict[str, tuple[int, ...]], complaint: str) -> None:
    model = Model(q=(4, 3), k=(2, 3), v=(2, 3), both=(2, 4, 3))
    with pytest.raises(ConfigError, match=complaint):
        load(model, {name: torch.zeros(shape) for name, shape in weights.items()}, SPLIT, GATE, UP)


def test_a_rule_for_weights_that_the_model_lacks_is_no_way_in() -> None:
    with pytest.raises(ConfigError, match="has no place"):
        load(Model(both=(1, 4, 3)), {"qkv.weight": torch.zeros(8, 3)}, SPLIT)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_experts_one_by_one_are_the_stacks_of_transformers(name: str, tmp_path: Path) -> None:
    path, families = tiny.write(name, tmp_path), find_families()
    spec = read_spec(load_config(path), families=families)
    family, theirs = families.named(spec.family), tiny.build(name).state_dict()
    stored = set(load_file(path / "model.safetensors"))
    assert (
        "model.layers.2.mlp.experts.7.up_proj.weight" in stored
        and "model.layers.2.mlp.experts.gate_up_proj" in theirs
    )
    made = []
    for weights in (safetensors_weights(path, family), theirs.items()):
        model = Decoder(spec, dtype=torch.float32, device="meta")
        fill(model, weights, family=family, device=CPU)
        made.append(dict(model.named_parameters()))
    assert made[0].keys() == theirs.keys()
    assert all(
        torch.equal(made[0][key], theirs[key]) and torch.equal(made[1][key], theirs[key])
        for key in theirs
    )


def test_layers_for_drafting_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    path, families = tiny.write("glm4_moe", tmp_path), find_families()
    stored = load_file(path / "model.safetensors")
    draft = {
        "model.layers.3.eh_proj.weight": torch.zeros(2),
        "model.layers.3.self_attn.q_proj.weight": torch.zeros(2),
    }
    save_file({**stored, **draft}, path / "model.safetensors")
    spec, family = read_spec(load_config(path), families=families), families.named("glm4_moe")
    model = Decoder(spec, dtype=torch.float32, device="meta")
    fill(model, safetensors_weights(path, family), family=family, device=CPU)
    save_file(
        {**stored, "model.layers.2.eh_proj.weight": torch.zeros(2)}, path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"layers\.2\.eh_proj"):
        fill(model, safetensors_weights(path, family), family=family, device=CPU)
