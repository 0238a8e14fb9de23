"""MXFP4 experts against Transformers' own unpacking, number by number and as a checkpoint of
gpt-oss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.base import ConfigError, UnsupportedError
from octavo.nn.decoder import Decoder
from octavo.runner.mxfp4 import dequantise
from octavo.runner.weights import fill, safetensors_weights
from octavo.spec.hf import find_families, load_config, read_spec
from tests import tiny

FAMILIES = find_families()
QUANTISED = {
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
}


def packed(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales of [..., values]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=torch.uint8
    )
    return blocks, torch.randint(
        118, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_and_scale_is_exact(dtype: torch.dtype) -> None:
    # Scales at which the smallest code is still a normal number; 255 is no number at all.
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2, 252, 1).unflatten(-1, (16, 16))
    scales = torch.arange(2, 254, dtype=torch.uint8)[None, :, None].expand(2, -1, 16).contiguous()
    mine = dequantise(blocks, scales)
    assert mine.dtype == torch.bfloat16 and mine.shape == (2, 252, 512)
    assert torch.equal(mine.mT.to(dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.mark.parametrize("change", [{"scales": (2, 3)}, {"dtype": torch.int8}])
def test_what_does_not_match_is_refused(change: dict[str, Any]) -> None:
    blocks = torch.zeros(2, 4, 16, dtype=change.get("dtype", torch.uint8))
    with pytest.raises(ConfigError, match="MXFP4"):
        dequantise(blocks, torch.zeros(change.get("scales", (2, 4)), dtype=torch.uint8))


def load(path: Path) -> Decoder:
    spec = read_spec({**load_config(path), **QUANTISED}, families=FAMILIES)
    model = Decoder(spec, dtype=torch.float32, device="meta")
    fill(
        model,
        safetensors_weights(path, FAMILIES.named("gpt_oss")),
        family=FAMILIES.named("gpt_oss"),
        device=torch.device("cpu"),
    )
    return model


def test_a_packed_checkpoint_is_the_unpacked_one(tmp_path: Path) -> None:
    path = tiny.write("gpt_oss", tmp_path)
    stored = load_file(path / "model.safetensors")
    floats, blocks, scales = dict(stored), {}, {}
    for seed, name in enumerate(
        sorted(name for name in stored if name.endswith(("gate_up_proj", "down_proj")))
    ):
        experts, inputs, outputs = stored[name].shape
        blocks[f"{name}_blocks"], scales[f"{name}_scales"] = packed(
            experts, outputs, inputs, seed=seed
        )
        floats[name] = convert_moe_packed_tensors(
            blocks[f"{name}_blocks"], scales[f"{name}_scales"], dtype=torch.float32
        )
    assert len(blocks) == 8
    save_file(floats, path / "model.safetensors")
    expected = dict(load(path).named_parameters())
    rest = {name: tensor for name, tensor in stored.items() if f"{name}_blocks" not in blocks}
    # Scales come in another file than their blocks, and before them.
    save_file({**rest, **scales}, path / "a.safetensors")
    save_file(blocks, path / "b.safetensors")
    files = {
        **dict.fromkeys((*rest, *scales), "a.safetensors"),
        **dict.fromkeys(blocks, "b.safetensors"),
    }
    (path / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {str(files).replace(chr(39), chr(34))}}}'
    )
    loaded = dict(load(path).named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.items())


def test_scales_without_blocks_have_no_place(tmp_path: Path) -> None:
    path = tiny.write("gpt_oss", tmp_path)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(
        {**stored, name: torch.zeros(8, 64, 3, dtype=torch.uint8)}, path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=name):
        load(path)


def test_other_families_and_methods_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="mxfp4"):
        read_spec({"model_type": "qwen3_moe", **QUANTISED}, families=FAMILIES)
    with pytest.raises(UnsupportedError, match="awq"):
        read_spec(
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "awq"}},
            families=FAMILIES,
        )
