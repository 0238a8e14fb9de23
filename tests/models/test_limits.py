"""The longest sequence that a config describes: one function for planner and engine, and as far as
it says, greedy tokens are Transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import LLM, ConfigError, SamplingParams
from octavo.plan.planner import plan
from octavo.spec.hf import find_families, load_config, read_spec, text_config
from octavo.spec.rope import longest_sequence
from tests import tiny

FAMILIES = find_families()
CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("limit", "scaling", "expected"),
    [
        (64, None, 64),
        (64, YARN, 256),
        (40960, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
        (64, {"rope_type": "yarn", "factor": 2.5}, 160),
        (131072, {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096}, 131072),
        (262144, {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096}, 262144),
        (2048, {"type": "linear", "factor": 8.0}, 16384),
        (2048, {"type": "dynamic", "factor": 2}, 4096),
        (
            16384,
            {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096},
            16384,
        ),
        (
            131072,
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
        ),
        (131072, {"rope_type": "longrope", "factor": 32.0}, 131072),
        (64, {"rope_type": "default", "factor": 4.0}, 64),
        (64, {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}, 256),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_what_scaling_makes_of_the_limit(
    limit: int, scaling: dict[str, Any] | None, expected: int, field: str
) -> None:
    given = {"max_position_embeddings": limit, field: scaling}
    assert longest_sequence(given, given) == expected


@pytest.mark.parametrize(
    "scaling",
    [{"type": "linear", "factor": 8.0}, {"full_attention": {"type": "linear", "factor": 8}}],
)
def test_a_family_whose_limit_is_scaled_already_keeps_it(scaling: dict[str, Any]) -> None:
    config = dict(tiny.SPECS["gemma3"]) | dict(tiny.BASE) | {"rope_scaling": scaling}
    for planning in (False, True):
        if not planning and "type" not in scaling:
            continue
        assert read_spec(config, families=FAMILIES, planning=planning).max_model_len == 4096


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_published_configs_keep_their_limit(path: Path) -> None:
    given = load_config(path)
    if "model_type" not in given:
        pytest.skip("no config")
    stated = text_config(given).get("max_position_embeddings")
    spec = read_spec(given, families=FAMILIES, planning=True)
    assert stated in (None, spec.max_model_len)


def write(root: Path, scaling: Mapping[str, Any]) -> Path:
    """A tiny Llama whose limit of 64 is left as it is, with scaling as a model card tells to add
    it.
    """
    directory = tiny.write("llama", root)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters", None)
    config |= {"max_position_embeddings": 64, "rope_scaling": dict(scaling), "rope_theta": 10000.0}
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("scaling", [YARN, {"type": "linear", "factor": 4.0}])
def test_beyond_the_trained_length_tokens_are_those_of_transformers(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    directory = write(tmp_path, scaling)
    assert plan(directory, memory="1GiB").max_model_len == 256
    llm = LLM(
        directory,
        dtype="float32",
        device="cpu",
        kv_memory="16MiB",
        max_model_len=256,
        skip_tokenizer_init=True,
    )
    prompt = [3 + (7 * place) % (tiny.VOCAB - 3) for place in range(150)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (output,) = llm.generate([prompt], params, progress=False)
    config = AutoConfig.from_pretrained(directory)
    oracle = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle.eval().generate(
            torch.tensor([prompt]), max_new_tokens=100, min_new_tokens=100, do_sample=False
        )[0, 150:]
    assert output.outputs[0].token_ids == expected.tolist()
    with pytest.raises(
        ConfigError, match="max_model_len 257 is beyond the model's own limit of 256"
    ):
        LLM(directory, max_model_len=257, kv_memory="16MiB")
