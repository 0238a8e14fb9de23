"""A scheduler that breaks under ``LLM`` and ``AsyncLLM`` with a model: streams go on unbroken, with
the tokens and texts that an undisturbed engine gives.

The oracle is the same engine before anything was planted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.aio import AsyncLLM, EngineDeadError, RequestFailedError, StepFailedError
from octavo.engine.outputs import RequestDelta
from octavo.engine.recovery import Recovery
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from tests import tiny
from tests.engine.test_aio import conserved
from tests.engine.test_text import BYTES
from tests.planted import Operation, PlantedError, counted, operations, parts, planted, wrapped

END = {"max_tokens": 24, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, SamplingParams, dict[str, Any]]] = {
    "greedy": ("a prompt that is longer than two units", SamplingParams(temperature=0, **END), {}),
    "drawn": ("a prompt that is longer than", SamplingParams(temperature=1.3, **END), {}),
    "several": (
        "many",
        SamplingParams(n=3, temperature=1.2, seed=5, logprobs=2, **END),
        {"priority": 2},
    ),
    "scored": (
        "what was this prompt worth, all in all? " * 2,
        SamplingParams(temperature=1, seed=7, prompt_logprobs=1, **END),
        {},
    ),
    "penalized": (
        "again and again",
        SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.3, min_tokens=5, **END),
        {"cache_salt": "tenant", "marks": (4,)},
    ),
    "late": ("a prompt that is longer", SamplingParams(n=2, seed=3, **END), {"priority": -1}),
}
"""By request id. What is drawn without a seed follows from the id."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write("gemma3", tmp_path_factory.mktemp("recovery"))
    BYTES.backend.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return load(model)


def load(model: Path) -> LLM:
    return LLM(
        model,
        dtype="float32",
        device="cpu",
        kv_memory="16MiB",
        max_model_len=256,
        max_num_seqs=5,
        max_num_batched_tokens=48,
    )


Deltas = list[RequestDelta]


def serve(llm: LLM, recovery: Recovery | None = None) -> dict[str, Deltas | Exception]:
    """All requests through a fresh ``AsyncLLM``; what came of each, delta by delta."""
    llm.core.recovery = recovery or Recovery(clock=lambda: 0.0)

    async def one(engine: AsyncLLM, name: str) -> Deltas | Exception:
        prompt, params, options = REQUESTS[name]
        got: Deltas = []
        try:
            async for delta in engine.stream(prompt, params, request_id=name, **options):
                got.append(delta)
        except (RequestFailedError, StepFailedError) as error:
            return error
        return got

    async def main() -> dict[str, Deltas | Exception]:
        engine = AsyncLLM(llm)
        try:
            made = await asyncio.gather(*(one(engine, name) for name in REQUESTS))
            counters = await engine.counters()
            assert counters.recoveries == llm.core.recovery.count
        finally:
            await engine.close(timeout=10)
        return dict(zip(REQUESTS, made, strict=True))

    return asyncio.run(main())


def told(deltas: Deltas) -> dict[int, tuple[str, list[int], list[str], list[float]]]:
    """By continuation: text, tokens, why it ended, logprobs. Checks that nothing came twice."""
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [bool(delta.prompt_token_ids) for delta in deltas] == [True] + [False] * (
        len(deltas) - 1
    )
    assert len({delta.num_cached_tokens for delta in deltas}) == 1
    assert deltas[0].explanation is not None
    found: dict[int, tuple[str, list[int], list[str], list[float]]] = {}
    for output in (output for delta in deltas for output in delta.outputs):
        text, tokens, reasons, logprobs = found.get(output.index, ("", [], [], []))
        found[output.index] = (
            text + output.text,
            [*tokens, *output.token_ids],
            [*reasons, *([output.finish_reason] if output.finish_reason else [])],
            [*logprobs, *(entry.logprob for entry in output.logprobs or ())],
        )
    return dict(sorted(found.items()))


def compare(got: dict[str, Deltas | Exception], calm: dict[str, Deltas | Exception]) -> list[str]:
    """Assert that all who did not fail got the same; returns who failed."""
    failed = [name for name, deltas in got.items() if isinstance(deltas, Exception)]
    for name, deltas in got.items():
        undisturbed = calm[name]
        if isinstance(deltas, Exception) or isinstance(undisturbed, Exception):
            continue
        for (index, mine), theirs in zip(
            told(deltas).items(), told(undisturbed).values(), strict=True
        ):
            assert mine[:3] == theirs[:3], (name, index)
            assert mine[3] == pytest.approx(theirs[3], abs=1e-4)
        if deltas[0].prompt_logprobs is not None:
            assert undisturbed[0].prompt_logprobs is not None
            assert [one and one.logprob for one in deltas[0].prompt_logprobs] == pytest.approx(
                [one and one.logprob for one in undisturbed[0].prompt_logprobs], abs=1e-4
            )
    return failed


def test_streams_go_on_wherever_the_scheduler_breaks(llm: LLM) -> None:
    calm = serve(llm)
    assert compare(calm, calm) == []
    rng, fired, failed = Random("async"), 0, 0
    with counted(operations(parts(llm.core.scheduler))) as calls:
        serve(llm)
    chosen = [one for one in calls if one[0].__name__ in ("Scheduler", "KVCacheManager")]
    chosen += [one for one in calls if one[0].__name__ == "PagePool"]
    for operation in chosen:
        if operation[1] in ("explain", "counts"):
            # Asked by clients and metrics as well.
            continue
        at = rng.randint(1, max(1, calls[operation] * 2 // 3))
        with planted(operation, at=at, after=rng.random() < 0.5):
            got = serve(llm)
        fired += llm.core.recovery.count
        assert llm.core.recovery.count <= 1
        ended = compare(got, calm)
        assert len(ended) <= 1
        failed += len(ended)
        conserved(llm)
    # Where a run was cut otherwise than the one that was counted, the call may not come.
    assert fired > 15 and failed > 4


def test_stop_strings_that_are_being_held_back(llm: LLM) -> None:
    """A recovery while text is held back that may become a stop string changes nothing."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (plain,) = llm.generate("stop it", params, progress=False)
    text = plain.outputs[0].text
    # Ends that come late, and one that never comes but begins everywhere.
    stop = text[18:22]
    wanted = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, stop=(stop, text[8:14] + "\0")
    )
    (calm,) = llm.generate("stop it", wanted, progress=False)
    assert calm.outputs[0].stop_reason == stop
    for at in range(2, 22, 3):
        llm.core.recovery = Recovery(clock=lambda: 0.0)
        with planted(Operation((Scheduler, "schedule")), at=at, after=True):
            (output,) = llm.generate("stop it", wanted, progress=False)
        assert llm.core.recovery.count == (at <= len(calm.outputs[0].token_ids))
        assert output.outputs == calm.outputs
    conserved(llm)


def test_llm_names_the_one_that_failed_and_computes_the_others(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [f"{number} is the number of this prompt" for number in range(7)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    calm = llm.generate(prompts, params, progress=False)
    llm.core.recovery = Recovery(clock=lambda: 0.0)
    with planted(Operation((type(llm.core.scheduler.cache), "admit")), at=3, after=True):
        outputs = llm.generate(prompts, params, progress=False)
    assert [output.error is None for output in outputs].count(False) == 1
    for output, expected in zip(outputs, calm, strict=True):
        assert output.finished
        if output.error is None:
            assert output.outputs == expected.outputs
        else:
            assert "planted in KVCacheManager.admit" in output.error
            assert output.outputs[0].finish_reason == "error"
            assert f"request {output.request_id}: something broke" in caplog.text
    # Of a single stream nobody else would be lost.
    with (
        planted(Operation((type(llm.core.scheduler.cache), "extend")), at=1, after=False),
        pytest.raises(RequestFailedError, match=r"planted in KVCacheManager\.extend"),
    ):
        list(llm.stream("one prompt", params))
    llm.core.recovery = Recovery(clock=lambda: 0.0)
    with planted(Operation((Scheduler, "add")), at=2, after=False):
        outputs = llm.generate(prompts[:3], params, progress=False)
    assert [output.error is None for output in outputs] == [True, False, True]
    conserved(llm)


def always(operation: Operation, call: Callable[[], Any]) -> Any:
    raise PlantedError("planted for good")


def test_llm_raises_at_the_third_failure_within_a_minute(model: Path) -> None:
    llm = load(model)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    now, calls = iter(range(0, 1000, 31)), 0
    llm.core.recovery = Recovery(clock=lambda: float(next(now)))

    def often(_: Operation, call: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls <= 5:
            raise PlantedError("planted five times, every 31 seconds")
        return call()

    with wrapped([Operation((Scheduler, "schedule"))], often):
        (output,) = llm.generate("patient", params, progress=False)
    assert output.error is None and llm.core.recovery.count == 5
    llm.core.recovery = Recovery(clock=lambda: 0.0)
    with (
        wrapped([Operation((Scheduler, "schedule"))], always),
        pytest.raises(EngineDeadError, match="planted for good"),
    ):
        llm.generate("impatient", params, progress=False)
    assert llm.core.recovery.count == 2
    with pytest.raises(EngineDeadError):
        llm.generate("too late", params, progress=False)


class Vandal:
    """A runner that leaves rubbish in every page of its step before it crashes."""

    def __init__(self, llm: LLM, at: int) -> None:
        self._inner, self._llm, self._left = llm.core._runner, llm, at

    def execute(self, plan: StepPlan) -> StepResult:
        self._left -= 1
        if self._left:
            return self._inner.execute(plan)
        unit = self._llm.built.layout.arena.unit_bytes
        for group, layout in zip(plan.groups, self._llm.built.layout.groups, strict=True):
            for page in {*group.write_page.tolist()} - {-1}:
                start = page * unit
                self._inner.arena.buffer[start : start + layout.page_units * unit] = 255
        raise RuntimeError("the device is on fire")


def test_what_a_failing_runner_leaves_in_memory_does_not_matter(llm: LLM) -> None:
    calm, inner = serve(llm), llm.core._runner
    ends = []
    for at in (1, 3, 6, 9):
        llm.core._runner = Vandal(llm, at)
        got = serve(llm)
        llm.core._runner = inner
        ends += [type(one) for one in got.values() if isinstance(one, Exception)]
        assert 0 < len(compare(got, calm)) < len(REQUESTS)
        assert llm.core.recovery.count == 0
        assert compare(serve(llm), calm) == []
    assert {*ends} == {StepFailedError}
    conserved(llm)
