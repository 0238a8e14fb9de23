"""The asynchronous engine: many clients at once, cancellation, crashes, shutdown; pages are
conserved through all of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, CapacityError, ConfigError, SamplingParams
from octavo.engine import insight
from octavo.engine.aio import (
    AsyncLLM,
    EngineClosedError,
    EngineDeadError,
    QueueFullError,
    RequestFailedError,
    StepFailedError,
)
from octavo.engine.core import TokenEvent
from octavo.engine.live import Live
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from tests import tiny
from tests.engine.test_text import BYTES

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write("gemma3", tmp_path_factory.mktemp("aio"))
    BYTES.backend.save_pretrained(directory)
    return directory


def load(model: Path, **options: Any) -> LLM:
    return LLM(
        model, dtype="float32", device="cpu", kv_memory="16MiB", max_model_len=256, **options
    )


@asynccontextmanager
async def serving(llm: LLM, **options: Any) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(llm, **options)
    try:
        yield engine
    finally:
        await engine.close(timeout=10)
        assert not engine._thread.is_alive()


def conserved(llm: LLM) -> None:
    """Nothing runs, and every page is free or cached."""
    llm.core.scheduler.check()
    assert not llm.core.has_work
    pool = llm.core.scheduler.cache.coordinator.pool
    for bucket in range(len(llm.built.layout.arena.page_units)):
        counts = pool.counts(bucket)
        assert counts.held == counts.limbo == 0


class Gate:
    """Lets a runner through step by step, and may make it crash."""

    def __init__(self, llm: LLM) -> None:
        self._inner = llm.core._runner
        llm.core._runner = self
        self.steps = threading.Semaphore(0)
        self.entered = threading.Event()
        self.crash: BaseException | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.steps.acquire(timeout=30), "nobody opened the gate"
        if self.crash is not None:
            crash, self.crash = self.crash, None
            raise crash
        return self._inner.execute(plan)

    def open(self) -> None:
        for _ in range(10_000):
            self.steps.release()


@pytest.fixture
def gated(model: Path) -> Iterator[tuple[LLM, Gate]]:
    llm = load(model)
    gate = Gate(llm)
    yield llm, gate
    gate.open()


def test_many_clients_get_what_each_would_get_alone(model: Path) -> None:
    llm = load(model, max_num_seqs=4)
    prompts = [f"prompt number {i} " * (1 + i % 5) for i in range(24)]
    alone = [
        output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)
    ]

    async def main() -> list[Any]:
        async with serving(llm) as engine:
            return await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))

    outputs = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert [output.outputs[0].text for output in outputs] == [BYTES.decode(ids) for ids in alone]
    conserved(llm)


def test_deltas_joined_are_the_output(model: Path) -> None:
    llm = load(model)
    params = SamplingParams(
        n=3, temperature=1.2, seed=5, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    (whole,) = llm.generate("hello", params, progress=False)

    async def main() -> list[Any]:
        async with serving(llm) as engine:
            return [delta async for delta in engine.stream("hello", params)]

    deltas = asyncio.run(main())
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[0].prompt_token_ids == whole.prompt_token_ids
    assert list(deltas[0].prompt_logprobs) == whole.prompt_logprobs
    assert deltas[0].explanation is not None and all(
        delta.explanation is None for delta in deltas[1:]
    )
    for index, completion in enumerate(whole.outputs):
        mine = [output for delta in deltas for output in delta.outputs if output.index == index]
        assert "".join(output.text for output in mine) == completion.text
        assert [token for output in mine for token in output.token_ids] == completion.token_ids
        assert [entry for output in mine for entry in output.logprobs] == completion.logprobs
        assert [output.finish_reason for output in mine if output.finish_reason] == ["length"]
    conserved(llm)


def test_a_client_that_leaves_frees_its_pages_within_one_step(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> None:
        async with serving(llm) as engine:
            stream = engine.stream("a prompt of some length", LONG)
            gate.steps.release(2)
            await anext(stream)
            await anext(stream)
            await asyncio.to_thread(gate.entered.wait, 10)
            await stream.aclose()
            gate.steps.release()
            counters = await engine.counters()
            assert counters.num_running == counters.num_waiting == 0
            assert all(bucket.held == bucket.limbo == 0 for bucket in counters.pages.buckets)

    asyncio.run(main())
    conserved(llm)


def test_a_cancelled_task_ends_its_request_wherever_it_is(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> None:
        async with serving(llm) as engine:
            tasks = [asyncio.create_task(engine.generate("prompt " * i, LONG)) for i in range(1, 6)]
            tasks[0].cancel()
            await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.to_thread(gate.entered.wait, 10)
            tasks[2].cancel()
            gate.steps.release(3)
            await asyncio.sleep(0.05)
            tasks[3].cancel()
            gate.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(result, asyncio.CancelledError) for result in results] == [
                True
            ] * 4 + [False]
            assert len(results[4].outputs[0].token_ids) == 200
            assert not engine._sessions and not engine._places

    asyncio.run(main())
    conserved(llm)


def test_the_event_loop_goes_on_while_a_step_is_computed(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> int:
        async with serving(llm) as engine:
            task = asyncio.create_task(engine.generate("prompt", GREEDY))
            await asyncio.to_thread(gate.entered.wait, 10)
            turns = 0
            while turns < 100:
                await asyncio.sleep(0)
                turns += 1
            assert not task.done() and engine.is_alive
            gate.open()
            await task
            return turns

    assert asyncio.run(main()) == 100
    conserved(llm)


def test_a_crashed_step_ends_its_requests_and_the_engine_goes_on(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> None:
        async with serving(llm) as engine:
            first = asyncio.create_task(engine.generate("first", LONG))
            await asyncio.to_thread(gate.entered.wait, 10)
            gate.steps.release(3)
            second = asyncio.create_task(
                engine.generate("second", SamplingParams(n=2, seed=1, max_tokens=50))
            )
            await asyncio.sleep(0.05)
            gate.crash = RuntimeError("out of memory, say")
            gate.steps.release()
            for task in (first, second):
                with pytest.raises(StepFailedError, match="out of memory"):
                    await task
            gate.open()
            assert len((await engine.generate("third", GREEDY)).outputs[0].token_ids) == 12
            assert engine.is_alive and (await engine.counters()).crashed_steps == 1

    asyncio.run(main())
    conserved(llm)


def test_a_scheduler_that_always_breaks_kills_the_engine_and_nobody_waits(
    gated: tuple[LLM, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, gate = gated

    async def main() -> None:
        async with serving(llm) as engine:
            task = asyncio.create_task(engine.generate("first", LONG))
            death = asyncio.create_task(engine.until_dead())
            await asyncio.to_thread(gate.entered.wait, 10)

            def broken(self: Scheduler) -> None:
                raise AssertionError("an invariant")

            monkeypatch.setattr(Scheduler, "schedule", broken)
            assert not death.done()
            gate.open()
            with pytest.raises(EngineDeadError, match="an invariant"):
                await task
            await asyncio.wait_for(death, 10)
            assert not engine.is_alive
            with pytest.raises(EngineDeadError):
                await engine.generate("second", GREEDY)
            with pytest.raises(EngineDeadError):
                await engine.counters()

    asyncio.run(main())


def test_a_scheduler_that_breaks_over_a_command_too_often_kills_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(model)

    def broken(self: Scheduler, request: Request) -> None:
        raise AssertionError("an invariant")

    async def main() -> None:
        async with serving(llm) as engine:
            stream = engine.stream("first", LONG)
            await anext(stream)
            monkeypatch.setattr(Scheduler, "add", broken)
            for error in (RequestFailedError, RequestFailedError, EngineDeadError):
                with pytest.raises(error):
                    await engine.generate("second", GREEDY)
            with pytest.raises(EngineDeadError):
                while True:
                    await anext(stream)

    asyncio.run(main())


def test_what_breaks_while_a_text_is_told_ends_that_request_only(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(model)
    (calm,) = llm.generate("bystander", LONG, progress=False)
    advance = Live.advance

    def broken(self: Live, core: Any, event: TokenEvent) -> Any:
        if event.request_id == "cursed" and len(self.output().outputs[0].token_ids) == 3:
            raise UnicodeError("what is this?")
        return advance(self, core, event)

    monkeypatch.setattr(Live, "advance", broken)

    async def main() -> None:
        async with serving(llm) as engine:
            bystander = asyncio.create_task(engine.generate("bystander", LONG))
            with pytest.raises(RequestFailedError, match="what is this"):
                await engine.generate("cursed", LONG, request_id="cursed")
            assert (await bystander).outputs == calm.outputs
            assert (await engine.counters()).recoveries == 0

    asyncio.run(main())
    conserved(llm)


def test_wrong_requests_are_refused_and_leave_nothing(model: Path) -> None:
    llm = load(model)

    async def main() -> None:
        async with serving(llm) as engine:
            with pytest.raises(ConfigError, match="empty"):
                await engine.generate([], GREEDY)
            with pytest.raises(ConfigError, match="vocabulary"):
                await engine.generate([10**6], GREEDY)
            with pytest.raises(CapacityError, match="max_model_len"):
                await engine.generate("x" * 300, GREEDY)
            stream = engine.stream("hello", LONG, request_id="same")
            await anext(stream)
            with pytest.raises(ConfigError, match="in use"):
                await engine.generate("hello", GREEDY, request_id="same")
            # The one that was refused has not taken the other one with it.
            assert len([delta async for delta in stream]) == 199
            assert not engine._places

    asyncio.run(main())
    conserved(llm)


def test_a_full_queue_refuses_and_says_when_to_come_back(model: Path) -> None:
    llm = load(model, max_num_seqs=2)
    gate = Gate(llm)

    async def main() -> None:
        async with serving(llm, max_waiting=3) as engine:
            tasks = [asyncio.create_task(engine.generate("prompt", GREEDY)) for _ in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="try again in") as refused:
                await engine.generate("one more", GREEDY)
            assert refused.value.retry_after >= 1
            gate.open()
            await asyncio.gather(*tasks)
            await engine.generate("now there is room", GREEDY)

    asyncio.run(main())
    conserved(llm)


def test_what_would_never_find_room_is_no_full_queue(model: Path) -> None:
    llm = load(model, max_num_seqs=2)

    async def main() -> None:
        async with serving(llm, max_waiting=1) as engine:
            assert (
                len((await engine.generate("prompt", SamplingParams(n=3, max_tokens=2))).outputs)
                == 3
            )
            with pytest.raises(ConfigError, match="n must be at most 3 here, not 4"):
                await engine.generate("prompt", SamplingParams(n=4, max_tokens=2))

    asyncio.run(main())
    conserved(llm)


def test_who_does_not_read_takes_no_place_once_all_is_computed(model: Path) -> None:
    llm = load(model, max_num_seqs=1)

    async def main() -> None:
        async with serving(llm, max_waiting=0) as engine:
            slow = engine.stream("a slow reader", LONG)
            await anext(slow)
            with pytest.raises(QueueFullError):
                await engine.generate("too early", GREEDY)
            while (await engine.counters()).num_running:
                await asyncio.sleep(0.01)
            assert len((await engine.generate("another", GREEDY)).outputs[0].token_ids) == 12
            assert len([delta async for delta in slow]) == 199

    asyncio.run(main())
    conserved(llm)


class Finished:
    """A recorder that keeps why requests ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def first_token(self, seconds: float) -> None:
        pass

    def inter_token(self, seconds: float) -> None:
        pass

    def finished(self, reason: str, **numbers: float) -> None:
        self.reasons.append(reason)


def test_what_was_refused_has_not_ended(model: Path) -> None:
    llm, recorder = load(model), Finished()

    async def main() -> None:
        async with serving(llm, recorder=recorder) as engine:
            with pytest.raises(CapacityError):
                await engine.generate("x" * 300, GREEDY)
            await engine.generate("x", GREEDY)
            stream = engine.stream("x", LONG)
            await anext(stream)
            await stream.aclose()

    asyncio.run(main())
    assert recorder.reasons == ["length", "abort"]


def test_many_who_look_cost_one_look(
    gated: tuple[LLM, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, gate = gated
    looks = []
    describe = insight.describe
    monkeypatch.setattr(insight, "describe", lambda *now: looks.append(now) or describe(*now))

    async def main() -> None:
        async with serving(llm) as engine:
            task = asyncio.create_task(engine.generate("prompt", GREEDY))
            await asyncio.to_thread(gate.entered.wait, 10)
            tasks = [asyncio.create_task(engine.snapshot()) for _ in range(20)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            gate.open()
            first, *others = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(first, asyncio.CancelledError)
            assert {other["stats"]["running"] for other in others} == {1}
            assert len(looks) == 1
            await task
            assert (await engine.snapshot())["stats"]["running"] == 0

    asyncio.run(main())


def test_close_lets_running_requests_finish_and_refuses_new_ones(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> None:
        engine = AsyncLLM(llm)
        task = asyncio.create_task(engine.generate("prompt", GREEDY))
        await asyncio.to_thread(gate.entered.wait, 10)
        closing = asyncio.create_task(engine.close(timeout=20))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError):
            await engine.generate("late", GREEDY)
        gate.open()
        assert len((await task).outputs[0].token_ids) == 12
        await closing
        assert not engine._thread.is_alive()

    asyncio.run(main())
    conserved(llm)


def test_close_ends_what_does_not_finish_in_time(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> None:
        engine = AsyncLLM(llm)
        task = asyncio.create_task(engine.generate("prompt", LONG))
        await asyncio.to_thread(gate.entered.wait, 10)
        gate.steps.release(2)
        closing = asyncio.create_task(engine.close(timeout=0))
        await asyncio.sleep(0.05)
        gate.steps.release()
        await closing
        with pytest.raises(EngineClosedError):
            await task
        assert not engine._thread.is_alive()

    asyncio.run(main())
    conserved(llm)


def test_close_keeps_no_client_waiting_for_a_step(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated

    async def main() -> None:
        engine = AsyncLLM(llm)
        tasks = [asyncio.create_task(engine.generate("prompt", LONG))]
        await asyncio.to_thread(gate.entered.wait, 10)
        tasks += [
            asyncio.create_task(engine.generate("not even entered", LONG)),
            asyncio.create_task(engine.snapshot()),
        ]
        patient = asyncio.create_task(engine.close(timeout=600))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        await asyncio.wait_for(engine.close(timeout=0), 10)
        # The step is still being computed.
        assert engine._thread.is_alive() and not engine.is_alive
        for task in tasks:
            with pytest.raises(EngineClosedError):
                await asyncio.wait_for(task, 10)
        await asyncio.wait_for(patient, 10)
        gate.open()
        await asyncio.to_thread(engine._thread.join, 30)
        assert not engine._thread.is_alive()

    asyncio.run(main())
    conserved(llm)


def test_priority_salt_and_marks_reach_the_scheduler(gated: tuple[LLM, Gate]) -> None:
    llm, gate = gated
    order: list[str] = []

    async def run(engine: AsyncLLM, name: str, **options: Any) -> Any:
        output = await engine.generate(
            "a prompt that is longer than two units of hash", GREEDY, **options
        )
        order.append(name)
        return output

    async def main() -> list[Any]:
        async with serving(llm) as engine:
            blocker = asyncio.create_task(engine.generate("blocker", GREEDY))
            await asyncio.to_thread(gate.entered.wait, 10)
            tasks = [
                asyncio.create_task(run(engine, "low", priority=-1, cache_salt="a")),
                asyncio.create_task(run(engine, "high", priority=5, cache_salt="b")),
            ]
            await asyncio.sleep(0.05)
            gate.open()
            first = await asyncio.gather(*tasks)
            await blocker
            again = [
                await run(engine, "again", cache_salt=salt, marks=(16,)) for salt in ("a", "c")
            ]
            return [*first, *again]

    outputs = asyncio.run(main())
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32, 0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    conserved(llm)
