"""The Python API on a tiny model with a byte tokenizer: prompts in every shape, streaming,
stopping, refusing, cleaning up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, CapacityError, ConfigError, SamplingParams
from octavo.engine.build import available_memory, digest_of, free_share, pick_device, pick_dtype
from tests import tiny
from tests.engine.test_text import BYTES

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
VARIED: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write("gemma3", tmp_path_factory.mktemp("llm"))
    BYTES.backend.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, dtype="float32", device="cpu", kv_memory="16MiB", max_model_len=256)


def idle(llm: LLM) -> bool:
    llm.core.scheduler.check()
    return not llm.core.has_work


def test_text_in_text_out(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY, progress=False)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == BYTES.encode("hello")
    assert output.finished
    (completion,) = output.outputs
    assert completion.index == 0
    assert len(completion.token_ids) == 12
    assert completion.text == BYTES.decode(completion.token_ids)
    assert completion.finish_reason == "length"
    assert output.cache_report is not None
    assert output.cache_report.tokens == 5 + 11
    assert idle(llm)


def test_prompts_in_every_shape(llm: LLM) -> None:
    ids = BYTES.encode("hello")
    (expected,) = llm.generate("hello", GREEDY, progress=False)
    for prompts in (
        "hello",
        ["hello"],
        ids,
        [ids],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids}],
        ("hello",),
    ):
        (output,) = llm.generate(prompts, GREEDY, progress=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_outputs_stand_in_the_order_of_prompts_with_params_of_their_own(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b"], [GREEDY], "2 prompts and 1 params"),
        ([], [GREEDY], "0 prompts and 1 params"),
        ([1, "a"], GREEDY, "prompt 0 is a number among prompts"),
        ([tiny.VOCAB], GREEDY, "token id 384 is outside"),
        ([[]], GREEDY, "the prompt is empty"),
        ("", GREEDY, "the prompt is empty"),
        ({"text": "a"}, GREEDY, "needs prompt_token_ids, not text"),
    ],
)
def test_wrong_prompts_are_refused(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompts, params, progress=False)
    assert idle(llm)


def test_what_can_never_fit_is_refused_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="max_model_len"):
        llm.generate(["short", "x" * 300], GREEDY, progress=False)
    assert idle(llm)
    assert llm.generate("short", GREEDY, progress=False)[0].finished


def test_stop_strings_end_the_text_and_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("stop here", SamplingParams(**VARIED), progress=False)
    text = whole.outputs[0].text
    stop = text[5:8]
    assert len(stop) == 3
    (output,) = llm.generate("stop here", SamplingParams(**VARIED, stop=[stop]), progress=False)
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < 40
    assert output.cache_report is not None
    assert idle(llm)


def test_the_token_that_ends_a_text_is_not_part_of_it(llm: LLM) -> None:
    (whole,) = llm.generate("hello", SamplingParams(**VARIED), progress=False)
    ids = whole.outputs[0].token_ids
    stop = next(token for token in ids[2:] if BYTES.decode([token]) and token not in ids[:2])
    end = ids.index(stop)
    (output,) = llm.generate(
        "hello", SamplingParams(**VARIED, stop_token_ids=[stop]), progress=False
    )
    assert output.outputs[0].token_ids == ids[: end + 1]
    assert output.outputs[0].text == BYTES.decode(ids[:end])
    assert output.outputs[0].text != BYTES.decode(ids[: end + 1])


def test_streaming_grows_to_the_same_output(llm: LLM) -> None:
    (expected,) = llm.generate("stream", GREEDY, progress=False)
    outputs = list(llm.stream("stream", GREEDY))
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert outputs[-1].outputs == expected.outputs


def test_a_listener_who_leaves_ends_the_request(llm: LLM) -> None:
    stream = llm.stream("leaving early", GREEDY)
    next(stream)
    stream.close()
    assert idle(llm)


def test_sampling_follows_its_seed_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate("seed", params, progress=False)
    together = llm.generate(["other", "seed", "third"], [GREEDY, params, GREEDY], progress=False)
    other = SamplingParams(temperature=1.5, seed=4, max_tokens=12, ignore_eos=True)
    (different,) = llm.generate("seed", other, progress=False)
    assert together[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert different.outputs[0].token_ids != alone.outputs[0].token_ids


def test_the_engine_seed_makes_whole_runs_repeatable(model: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        llm = LLM(
            model, dtype="float32", device="cpu", kv_memory="16MiB", max_model_len=256, seed=seed
        )
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        return [
            output.outputs[0].token_ids
            for output in llm.generate(["a", "a", "b"], params, progress=False)
        ]

    first = run(1)
    assert first == run(1)
    assert first != run(2)
    assert first[0] != first[1]


def test_without_tokenizer(model: Path) -> None:
    llm = LLM(
        model,
        dtype="bfloat16",
        device="cpu",
        kv_memory="16MiB",
        max_model_len=256,
        skip_tokenizer_init=True,
    )
    (output,) = llm.generate([5, 6, 7], GREEDY, progress=False)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].text == ""
    with pytest.raises(ConfigError, match="text prompt needs the tokenizer"):
        llm.generate("text", GREEDY, progress=False)
    with pytest.raises(ConfigError, match="stop strings need the tokenizer"):
        llm.generate([5], SamplingParams(stop="x"), progress=False)


def test_missing_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer could be read"):
        LLM(tiny.write("llama", tmp_path), kv_memory="16MiB")


def test_longer_than_the_model_is_refused(model: Path) -> None:
    with pytest.raises(
        ConfigError, match="max_model_len 5000 is beyond the model's own limit of 4096"
    ):
        LLM(model, max_model_len=5000, kv_memory="16MiB")


def test_memory_that_holds_nothing_is_refused(model: Path) -> None:
    with pytest.raises(CapacityError):
        LLM(model, kv_memory=1000)


def test_defaults_of_the_device(tmp_path: Path) -> None:
    cpu = pick_device("cpu")
    assert (pick_dtype("auto", cpu), pick_dtype("bfloat16", cpu)) == ("float32", "bfloat16")
    assert 0 < free_share(0, cpu) < available_memory()
    with pytest.raises(CapacityError, match="the weights need"):
        free_share(1 << 60, cpu)
    with pytest.raises(ConfigError, match="PyTorch sees"):
        pick_device("cuda:99")
    with pytest.raises(ConfigError, match="give kv_memory"):
        available_memory(tmp_path / "meminfo")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert available_memory(meminfo) == 51200


def test_digest_tells_checkpoints_apart(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(b"1")
    first = digest_of({"a": 1}, [file])
    assert first == digest_of({"a": 1}, [file])
    assert first != digest_of({"a": 2}, [file])
    file.write_bytes(b"22")
    assert first != digest_of({"a": 1}, [file])
