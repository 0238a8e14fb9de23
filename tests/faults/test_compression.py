"""Prompts that end beside the borders of a compressor's groups, of its window and of a logical
block, in the real engine.

Protects: what a compressor keeps of single tokens is enough at any length; entries closed by a
token are seen by it; resume points and forks have their open groups. Ratios 4 and 128 and the
window of 128 are those of DeepSeek-V4; what is right says Transformers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests import tiny

NAME, UNIT, COUNT, TIE = "deepseek_v4_r128", 256, 4, 1e-4
SMALL, LARGE = (3, 4, 5, 7, 8, 9), (127, 128, 129, 255, 256, 257)
TEXT = tiny.prompt(650, 11)
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def engine(root: Path, **options: object) -> LLM:
    given: dict[str, object] = {
        "kv_memory": "32MiB",
        "max_model_len": 1024,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    return LLM(tiny.write(NAME, root), dtype="float32", **{**given, **options})  # type: ignore[arg-type]


@cache
def expected(length: int) -> list[int]:
    """What follows the first ``length`` tokens of the text, without a tie on the way."""
    made, gap = tiny.greedy(NAME, TEXT[:length], COUNT)
    assert gap > TIE, "a tie: choose another text"
    return made


def check(llm: LLM, lengths: tuple[int, ...]) -> list[int]:
    """Compute the first tokens of the text; returns how many of each came from the prefix cache."""
    outputs = llm.generate([TEXT[:length] for length in lengths], GREEDY, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected(length) for length in lengths
    ]
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    ("budget", "lengths"),
    [(2048, SMALL + LARGE), (61, SMALL + LARGE), (1, SMALL), (9, (9, 129, 257))],
)
def test_prompts_that_end_beside_a_border(
    root: Path, budget: int, lengths: tuple[int, ...]
) -> None:
    check(engine(root, max_num_batched_tokens=budget, enable_prefix_caching=False), lengths)


@pytest.mark.parametrize("budget", [2048, 77])
def test_every_logical_block_is_a_place_to_go_on_from(root: Path, budget: int) -> None:
    """With a checkpoint at each: there no group is open, and a resume point holds the group before,
    and the windows.
    """
    llm = engine(root, max_num_batched_tokens=budget, checkpoint_interval=UNIT)
    assert llm.core.scheduler.cache.layout.hash_unit == UNIT
    assert check(llm, (600,)) == [0]
    assert check(llm, (257, 300, 512, 513, 600)) == [256, 256, 256, 512, 512]


@torch.no_grad()
def test_continuations_share_a_prompt_that_ends_inside_a_group(root: Path) -> None:
    """Each goes on from the open group it was forked on, which none of them may change for the
    others.
    """
    llm = engine(root, max_num_batched_tokens=100)
    params = SamplingParams(temperature=1, n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=1)
    for output in llm.generate([TEXT[:length] for length in (6, 126, 254)], params, progress=False):
        made = {tuple(one.token_ids) for one in output.outputs}
        assert len(made) == 3, "continuations that are alike show nothing"
        for one in output.outputs:
            prompt = output.prompt_token_ids
            logits = tiny.logits(NAME, prompt + one.token_ids)[len(prompt) - 1 : -1]
            right = torch.log_softmax(logits, dim=1)[range(6), one.token_ids]
            assert one.logprobs is not None
            torch.testing.assert_close(
                torch.tensor([each.logprob for each in one.logprobs]), right, atol=1e-4, rtol=0
            )
