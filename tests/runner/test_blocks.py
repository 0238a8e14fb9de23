"""Checkpoints in fp8 and fp4 with scales per block: values written out one by one, whole models,
and what is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.base import ConfigError, UnsupportedError
from octavo.ops.codec import E2M1
from octavo.runner.blocks import read
from octavo.runner.weights import safetensors_weights
from octavo.spec.hf import find_families, load_config, read_spec, weight_block
from tests import tiny

FAMILIES = find_families()
FP8 = torch.float8_e4m3fn
EXPONENT = torch.float8_e8m0fnu


def stored(
    path: Path,
    tensors: dict[str, Tensor],
    name: str = "x.weight",
    block: tuple[int, int] = (128, 128),
) -> Tensor:
    """What ``read`` makes of ``name`` in a file of ``tensors``."""
    save_file(tensors, path / "some.safetensors")
    with safe_open(path / "some.safetensors", framework="pt") as handle:
        return read(name, dict.fromkeys(tensors, handle), block)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scales", ["x.weight_scale_inv", "x.scale"])
@pytest.mark.parametrize("kept", [torch.float32, EXPONENT])
@pytest.mark.parametrize(
    ("shape", "block"), [((256, 128), (128, 128)), ((130, 257), (128, 128)), ((5, 7), (2, 3))]
)
def test_fp8_times_the_scale_of_its_block(
    tmp_path: Path, scales: str, kept: torch.dtype, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    weight = (20 * random(*shape)).to(FP8)
    factors = (2.0 ** torch.arange(blocks[0] * blocks[1]).view(blocks) / 8) * (
        1 if kept is EXPONENT else 1.37
    )
    made = stored(tmp_path, {"x.weight": weight, scales: factors.to(kept)}, block=block)
    assert made.dtype == torch.float32 and made.shape == shape
    values, factors = weight.float().tolist(), factors.to(kept).float()
    for row in range(0, shape[0], 3):
        for column in range(shape[1]):
            factor = factors[row // block[0], column // block[1]]
            assert made[row, column] == torch.tensor(values[row][column]) * factor


@pytest.mark.parametrize("columns", [64, 40])
def test_fp4_times_the_scale_of_its_group(tmp_path: Path, columns: int) -> None:
    packed = torch.randint(
        -128, 128, (6, columns // 2), generator=torch.Generator().manual_seed(0)
    ).to(torch.int8)
    exponents = torch.arange(120, 132, dtype=torch.uint8).view(6, 2).view(EXPONENT)
    made = stored(tmp_path, {"x.weight": packed, "x.scale": exponents})
    assert made.shape == (6, columns)
    for row in range(6):
        for column in range(columns):
            byte = int(packed[row, column // 2]) & 0xFF
            code = byte >> 4 if column % 2 else byte & 15
            assert made[row, column] == E2M1[code] * 2.0 ** (120 + 2 * row + column // 32 - 127)


def test_stacked_experts_have_blocks_of_their_own(tmp_path: Path) -> None:
    weight, factors = random(3, 6, 4).to(FP8), random(3, 3, 2).abs()
    made = stored(
        tmp_path, {"experts.up": weight, "experts.up_scale_inv": factors}, "experts.up", (2, 2)
    )
    assert torch.equal(
        made, weight.float() * factors.repeat_interleave(2, 1).repeat_interleave(2, 2)
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"x.weight": torch.zeros(4, 4).to(FP8)},
            "x.weight is fp8, and the checkpoint has neither",
        ),
        (
            {"x.weight": torch.zeros(4, 4).to(FP8), "x.scale": torch.ones(2, 1)},
            r"its scales \(2, 1\) must be \(1, 1\)",
        ),
        (
            {"x.weight": torch.zeros(4, 16).to(torch.int8), "x.scale": torch.ones(4, 1)},
            "scales of fp4 tensor x.weight are",
        ),
        (
            {"x.weight": torch.zeros(4, 4), "x.weight_scale_inv": torch.ones(1, 1)},
            "has scales x.weight_scale_inv, but is",
        ),
    ],
)
def test_what_does_not_match_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stored(tmp_path, tensors)


QUANTISED = (
    r"(self_attn|mlp|experts\.\d+|shared_experts)\.\w+_proj\w*\.weight$"
    r"|attn\.w(q_a|q_b|kv|o_a|o_b)\.weight$"
    r"|\.w[123]\.weight$"
)
"""Names of weights that DeepSeek quantises: projections, but for those of compressors and indexers.
"""


def quantise(directory: Path, block: tuple[int, int], style: str) -> dict[str, Tensor]:
    """Turn the projections of a checkpoint into fp8 (``v3``, ``v4``) and its MLPs into fp4
    (``v4``); returns their values.
    """
    tensors = load_file(directory / "model.safetensors")
    values = {}
    for name, weight in list(tensors.items()):
        if not re.search(QUANTISED, name):
            values[name] = weight
        elif style == "v4" and re.search(r"\.mlp\.|\.experts\.", name):
            packed = torch.randint(
                -128,
                128,
                (weight.shape[0], weight.shape[1] // 2),
                generator=torch.Generator().manual_seed(1),
            )
            exponents = torch.full((weight.shape[0], weight.shape[1] // 32), 121, dtype=torch.uint8)
            tensors[name], tensors[name.replace(".weight", ".scale")] = (
                packed.to(torch.int8),
                exponents.view(EXPONENT),
            )
            codes = torch.stack((packed & 15, (packed >> 4) & 15), -1).flatten(1)
            values[name] = torch.tensor(E2M1)[codes] * 2.0**-6
        else:
            shape = [-(-size // each) for size, each in zip(weight.shape, block, strict=True)]
            factors = 2.0 ** -(4 + torch.arange(shape[0] * shape[1]).view(shape) % 3).float()
            wide = factors.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(
                block[1], 1
            )[:, : weight.shape[1]]
            tensors[name] = (weight / wide).clamp(-448, 448).to(FP8)
            values[name] = tensors[name].float() * wide
            kept = factors if style == "v3" else factors.to(EXPONENT)
            tensors[f"{name}_scale_inv" if style == "v3" else name.replace(".weight", ".scale")] = (
                kept
            )
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize(
    ("style", "block"), [("v3", (128, 128)), ("v3", (48, 40)), ("v4", (128, 128))]
)
def test_a_quantised_checkpoint_is_the_one_of_its_values(
    tmp_path: Path, style: str, block: tuple[int, int]
) -> None:
    path = tiny.write("llama", tmp_path)
    values = quantise(path, block, style)
    assert weight_block(load_config(path)) == block
    loaded = dict(safetensors_weights(path, FAMILIES.named("llama"), block=block))
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name].float(), values[name]) for name in values)
    assert greedy(path) == greedy(unquantised(path, values))


OFFICIAL = (
    ("^model\\.", ""),
    ("^embed_tokens", "embed"),
    ("^lm_head", "head"),
    ("^hc_head\\.hc_", "hc_head_"),
    ("attn\\.norm", "attn.kv_norm"),
)
"""What DeepSeek-V4's own checkpoints call otherwise than Transformers does."""


@pytest.mark.parametrize(
    ("name", "style"), [("deepseek_v3", "v3"), ("deepseek_v32", "v3"), ("deepseek_v4", "v4")]
)
def test_checkpoints_with_the_names_of_deepseek(tmp_path: Path, name: str, style: str) -> None:
    path = tiny.write(name, tmp_path)
    if style == "v4":
        tensors = load_file(path / "model.safetensors")
        for pattern, other in OFFICIAL:
            tensors = {re.sub(pattern, other, tensor): values for tensor, values in tensors.items()}
        save_file(tensors, path / "model.safetensors")
    values = quantise(path, (48, 40), style)
    kept = load_file(path / "model.safetensors")
    assert sum(tensor.dtype == FP8 for tensor in kept.values()) > 10
    assert sum(tensor.dtype == torch.int8 for tensor in kept.values()) > 10 or style == "v3"
    assert greedy(path) == greedy(unquantised(path, values))


def unquantised(path: Path, values: dict[str, Tensor]) -> Path:
    """The same checkpoint with plain values."""
    plain = path.parent / "plain"
    plain.mkdir()
    config = {
        key: value for key, value in load_config(path).items() if key != "quantization_config"
    }
    (plain / "config.json").write_text(json.dumps(config))
    save_file(
        {name: value.contiguous() for name, value in values.items()}, plain / "model.safetensors"
    )
    return plain


def greedy(directory: Path) -> list[int]:
    llm = LLM(
        directory,
        dtype="float32",
        kv_memory="8MiB",
        max_model_len=256,
        device="cpu",
        skip_tokenizer_init=True,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return llm.generate([tiny.prompt(9)], params, progress=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "said",
    [{}, {"weight_block_size": None}, {"weight_block_size": [128]}, {"weight_block_size": [0, 1]}],
)
def test_scales_of_another_shape_are_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    config = {
        **load_config(tiny.write("llama", tmp_path)),
        "quantization_config": {"quant_method": "fp8", **said},
    }
    with pytest.raises(UnsupportedError, match=r"quantization_config\.weight_block_size"):
        read_spec(config, families=FAMILIES)
