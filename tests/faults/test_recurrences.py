"""Layers with a state, in numbers: whoever else is in the batch, in the page before, or on the same
prefix, nothing shows.

Owns scenarios over the whole engine with tiny models of each recurrence, judged by Transformers
(for plain linear attention by its quadratic form), which computes everything anew for every token.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from tests import tiny

COUNT = 6
NAMES = (
    "qwen3_next",
    "kimi_linear",
    "minimax",
    "recurrent_gemma",
    "lfm2",
    "linear_transformer",
    "mamba",
    "mamba2",
    "falcon_h1",
    "jamba",
)
every_recurrence = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrences")


def engine(root: Path, name: str, **options: object) -> LLM:
    given: dict[str, object] = {
        "dtype": "float32",
        "kv_memory": "8MiB",
        "max_model_len": 256,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    return LLM(tiny.write(name, root), **{**given, **options})  # type: ignore[arg-type]


def generate(llm: LLM, prompts: list[list[int]], n: int = 1) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, n=n)
    return llm.generate(prompts, params, progress=False)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@cache
def right(name: str, prompt: tuple[int, ...]) -> list[int]:
    made, gap = tiny.greedy(name, list(prompt), COUNT)
    assert gap > 1e-4, "the prompt has no tie"
    return made


def rights(name: str, prompts: list[list[int]]) -> list[list[int]]:
    return [right(name, tuple(prompt)) for prompt in prompts]


@every_recurrence
def test_identical_requests_in_one_batch_give_one_answer(root: Path, name: str) -> None:
    """Four of one prompt at once, cut into chunks that mix them, and beside another at another
    position.
    """
    prompt, other = tiny.prompt(37, 21), tiny.prompt(11, 22)
    llm = engine(root, name, max_num_batched_tokens=16, enable_prefix_caching=False)
    outputs = answers(generate(llm, [prompt, prompt, other, prompt, prompt]))
    first, beside = rights(name, [prompt, other])
    assert outputs == [first, first, beside, first, first]


@every_recurrence
def test_a_recycled_page_shows_nothing_of_its_former_owner(root: Path, name: str) -> None:
    """One request after another in the same pages; what is shorter than a convolution reads zeros
    before its first token.
    """
    prompts = [tiny.prompt(length, 30 + length) for length in (40, 1, 2, 3, 17)]
    llm = engine(root, name, max_num_seqs=1, enable_prefix_caching=False)
    assert [answers(generate(llm, [prompt]))[0] for prompt in prompts] == rights(name, prompts)


@every_recurrence
def test_answers_of_one_prompt_keep_states_of_their_own(root: Path, name: str) -> None:
    prompt = tiny.prompt(35, 41)
    (output,) = generate(engine(root, name), [prompt], n=3)
    assert [completion.token_ids for completion in output.outputs] == [
        right(name, tuple(prompt))
    ] * 3


@every_recurrence
def test_states_inside_a_chunk_are_those_of_their_place(root: Path, name: str) -> None:
    """A prompt of 90 tokens in one step with a state every 16. Siblings that leave it at 70 and at
    33 go on from 64 and 32, twice each, so what a checkpoint holds is not what its first reader
    made of it.
    """
    prompt = tiny.prompt(90, 51)
    siblings = [prompt[:cut] + tiny.prompt(5, cut + again) for again in (0, 1) for cut in (70, 33)]
    llm = engine(root, name, checkpoint_interval=16)
    assert answers(generate(llm, [prompt])) == rights(name, [prompt])
    for sibling, hit in zip(siblings, (64, 32, 64, 32), strict=True):
        (output,) = generate(llm, [sibling])
        assert (output.num_cached_tokens, answers([output])) == (hit, rights(name, [sibling]))


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_the_third_of_a_family_goes_on_from_a_short_shared_prefix(root: Path, name: str) -> None:
    """48 shared tokens that nobody announced: the second leaves a state where it left the first,
    whatever a state's size.
    """
    shared = tiny.prompt(48, 81)
    prompts = [shared + tiny.prompt(20, 90 + sibling) for sibling in range(3)]
    llm = engine(root, name)
    outputs = [generate(llm, [prompt])[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 48]
    assert answers(outputs) == rights(name, prompts)


@every_recurrence
def test_models_in_bfloat16_say_the_same_but_for_rounding(root: Path, name: str) -> None:
    """How likely every token of a prompt is, computed in chunks: on average a few hundredths from
    float32.
    """
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    made = []
    for dtype in ("float32", "bfloat16"):
        llm = engine(root, name, dtype=dtype, max_num_batched_tokens=16)
        (output,) = llm.generate([tiny.prompt(70, 71)], params, progress=False)
        made.append(
            torch.tensor([one.logprob for one in output.prompt_logprobs or () if one is not None])
        )
    exact, rounded = made
    assert exact.std() > 0.3 and (exact - rounded).abs().mean() < 0.1 * exact.std()


@every_recurrence
@pytest.mark.parametrize("length", [63, 64, 65])
def test_chunks_of_a_scan_end_where_they_like(root: Path, name: str, length: int) -> None:
    """Around the 64 tokens that a scan takes at once: whole, and with a step's border one token
    beside it.
    """
    prompt = tiny.prompt(length, 61)
    for budget in (2048, 64):
        llm = engine(root, name, max_num_batched_tokens=budget, enable_prefix_caching=False)
        assert answers(generate(llm, [prompt[3:], prompt])) == rights(name, [prompt[3:], prompt])
