"""A scheduler that breaks in any of its operations: whoever was not the cause gets what an
undisturbed engine gives, and the dump shows the exception again.

The engine's own core on the simulator's device, many runs from seeds. ``test_recovery_llm.py`` does
it with a model, ``tests/server/test_recovery.py`` over HTTP.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.base import CapacityError
from octavo.cache.layout import CacheLayout
from octavo.cache.manager import KVCacheManager
from octavo.cli.main import main
from octavo.engine.core import EngineCore, TokenEvent
from octavo.engine.errors import EngineDeadError, RequestFailedError
from octavo.engine.recovery import MAX_DUMPS, Recovery, write_dump
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult, TokenLogprobs
from octavo.sim.clients import Clients
from octavo.sim.fake import FakeRunner
from octavo.sim.model import draw_model
from octavo.sim.replay import read, replay
from octavo.sim.world import make_scheduler
from tests.planted import Operation, PlantedError, counted, operations, parts, planted, wrapped

SEEDS = range(3)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Device:
    """The simulator's runner as an executor: it checks every read and write, and knows what each
    request is to get.
    """

    def __init__(self, layout: CacheLayout, vocab_size: int) -> None:
        self.fake = FakeRunner(layout, vocab_size=vocab_size)

    def meet(self, request: Request, branch: int = 0) -> None:
        params, name = request.params, request.request_id.partition("#")[0]
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        self.fake.register(
            f"{name}#{branch}" if branch else name,
            request.prompt_token_ids,
            params,
            request.cache_salt,
            branch=branch,
            ends=frozenset(ends),
            constraint=request.constraint,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        # One step at a time: the receipts of all earlier ones are in.
        for step in list(self.fake._in_flight):
            self.fake.settle(step)
        return self.fake.execute(plan)


@dataclass
class Told:
    """What a client was told of a continuation."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Outcome:
    """What became of all requests. cached: what a request was said to have hit, at every event."""

    told: dict[tuple[str, int], Told] = field(default_factory=dict)
    scored: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    cached: dict[str, set[int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    recoveries: int = 0


class Lab:
    """An engine's core and its clients, all from a seed."""

    def __init__(self, seed: int, recovery: Recovery) -> None:
        self.layout = roomy_layout(seed)
        rng = Random(f"lab/{seed}")
        vocab_size = rng.choice((2, 3, 5))
        self.scheduler = make_scheduler(self.layout, rng)
        self.device = Device(self.layout, vocab_size)
        self.core = EngineCore(self.scheduler, self.device, recovery=recovery)
        clients = Clients(rng, vocab_size=vocab_size, max_model_len=self.layout.max_model_len)
        # None that is refused: what is refused is no part of a record.
        made = (clients.request() for _ in range(1000))
        fit = (one for one in made if self._fits(one))
        self.coming = list(islice(fit, rng.choice((6, 9))))
        self.gap = rng.choice((0, 1, 3))
        # Continuations that a stop string ends after so many tokens, and requests whose client
        # leaves after so many.
        self.stops = {(one.request_id, rng.randrange(2)): rng.randint(1, 4) for one in self.coming}
        self.leaves = {one.request_id: rng.randint(1, 20) for one in self.coming[::5]}
        self.outcome = Outcome()

    def _fits(self, request: Request) -> bool:
        try:
            make_scheduler(self.layout, Random(0)).add(request)
        except CapacityError:
            return False
        return True

    def run(self) -> Outcome:
        core, steps, coming = self.core, 0, list(self.coming)
        while coming or core.has_work:
            if coming and (steps % (self.gap + 1) == 0 or not core.has_work):
                self._add(coming.pop(0))
            for event in core.step():
                self._take(event)
            steps += 1
            assert steps < 5000, "nobody gets anything any more"
        self.outcome.recoveries = core.recovery.count
        return self.outcome

    def _add(self, request: Request) -> None:
        self.device.meet(request)
        try:
            self.core.add(request)
        except RequestFailedError:
            self.outcome.failed.append(request.request_id)

    def _take(self, event: TokenEvent) -> None:
        name = event.request_id
        if event.error is not None:
            assert isinstance(event.error, RequestFailedError)
            self.outcome.failed.append(name)
            return
        opened = next(one for one in self.coming if one.request_id == name)
        told = self.outcome.told.setdefault((name, event.branch), Told())
        assert told.reason is None, "nothing comes after the end"
        if event.branch and not told.tokens and event.finish_reason is None:
            self.device.meet(self.core._open[name].requests[event.branch], event.branch)
        told.tokens += event.token_ids
        told.logprobs += event.logprobs
        told.reason = None if event.finish_reason is None else str(event.finish_reason)
        self.outcome.scored.setdefault(name, list(opened.scored))
        self.outcome.cached.setdefault(name, set()).add(opened.num_cached_tokens)
        if told.reason is None and self.stops.get((name, event.branch)) == len(told.tokens):
            told.reason = "stop string"
            assert self.core.abort(name, event.branch)
        elif told.reason is None and self.leaves.get(name) == len(told.tokens):
            told.reason = "left"
            self.core.abort(name)


def roomy_layout(seed: int) -> CacheLayout:
    """Of a toy model, with room for most requests."""
    rng = Random(f"model/{seed}")
    while True:
        _, layout = draw_model(rng)
        with suppress(CapacityError):
            Scheduler(layout, max_num_batched_tokens=1, max_num_seqs=1).cache.check_capacity(
                layout.max_model_len * 3 // 4
            )
            return layout


def conserved(core: EngineCore) -> None:
    core.scheduler.check()
    assert not core.has_work and not core._open
    pool = core.scheduler.cache.coordinator.pool
    for bucket in range(len(core.scheduler.layout.arena.page_units)):
        assert pool.counts(bucket).held == pool.counts(bucket).limbo == 0


def same(disturbed: Outcome, calm: Outcome) -> None:
    """All but those that failed got what they were to get; those got the beginning of it."""
    for key, told in calm.told.items():
        name, _ = key
        got = disturbed.told.get(key, Told())
        if name in disturbed.failed:
            assert got.tokens == told.tokens[: len(got.tokens)]
            continue
        if any(told.reason == "left" for (other, _), told in calm.told.items() if other == name):
            # How far the other continuations come by then is a matter of timing.
            shorter = min(len(got.tokens), len(told.tokens))
            assert got.tokens[:shorter] == told.tokens[:shorter]
            continue
        assert got == told, key
        assert disturbed.scored[name] == calm.scored[name]
    for cached in disturbed.cached.values():
        assert len(cached) == 1, "what the first admission found is told to the end"


def lab(seed: int, dumps: Path | None = None, **options: Any) -> Lab:
    return Lab(seed, Recovery(dumps=dumps, clock=Clock(), **options))


def chosen(calls: Counter[Operation], rng: Random) -> list[tuple[Operation, int, bool]]:
    """Where to plant: every operation of scheduler, manager and index that is ever called, and some
    of those below; at a call drawn from all, before or after its work.
    """
    first = [one for one in calls if one[0].__name__ in ("Scheduler", "KVCacheManager")]
    index = [one for one in calls if "Index" in one[0].__name__]
    rest = [one for one in calls if one not in first and one not in index]
    some = [*first, *index, *rng.sample(rest, min(8, len(rest)))]
    return [(one, rng.randint(1, calls[one]), rng.random() < 0.5) for one in some]


@pytest.mark.parametrize("seed", SEEDS)
def test_bystanders_get_what_an_undisturbed_engine_gives(seed: int, tmp_path: Path) -> None:
    rng, calm = Random(f"where/{seed}"), lab(seed)
    with counted(operations(parts(calm.scheduler))) as calls:
        undisturbed = calm.run()
    conserved(calm.core)
    assert undisturbed.recoveries == 0 and not undisturbed.failed and len(calls) > 30
    named = 0
    for number, (operation, at, after) in enumerate(chosen(calls, rng)):
        folder = tmp_path / str(number)
        one = lab(seed, folder)
        with planted(operation, at=at, after=after) as made:
            disturbed = one.run()
        assert made[0] >= at and disturbed.recoveries == 1, operation
        assert len(disturbed.failed) <= 1
        named += len(disturbed.failed)
        if str(operation).removeprefix("KVCacheManager.") in ("admit", "lookup", "extend"):
            assert len(disturbed.failed) == 1, operation
        same(disturbed, undisturbed)
        conserved(one.core)
        # The dump shows it again: the same call, in its count, of the same operation.
        (dump,) = folder.iterdir()
        record = read(dump)
        with planted(operation, at=at, after=after):
            again = replay(record)
        assert isinstance(again.error, PlantedError), operation
        assert again.calls == len(record.calls.split())
        assert record.complete and record.failure.type == "PlantedError"
    assert named > 5


def test_a_scheduler_made_by_a_recovery_has_a_record_too(tmp_path: Path) -> None:
    shown = 0
    for seed in range(10):
        one, rng = lab(seed, tmp_path / str(seed)), Random(f"twice/{seed}")
        operation = Operation((KVCacheManager, rng.choice(("extend", "commit", "receive"))))
        first = rng.randint(4, 24)
        second = first + rng.randint(1, 12)
        calls = 0

        def twice(
            _: Operation, call: Any, operation: Operation = operation, at: Any = (first, second)
        ) -> Any:
            nonlocal calls
            calls += 1
            if calls in at:
                raise PlantedError(f"planted in {operation}")
            return call()

        with wrapped([operation], twice):
            outcome = one.run()
        same(outcome, lab(seed).run())
        if outcome.recoveries < 2:
            continue
        *_, dump = sorted((tmp_path / str(seed)).iterdir())
        record = read(dump)
        assert record.complete
        with planted(operation, at=second - first, after=False):
            again = replay(record)
        assert isinstance(again.error, PlantedError) and again.calls == len(record.calls.split())
        shown += any(begun.tokens for one in record.requests for begun in one.begun)
    assert shown


class Fixed:
    """A device whose tokens are large numbers, by place only. breaks_at: the step that crashes."""

    def __init__(self, *, breaks_at: int | None = None) -> None:
        self.breaks_at = breaks_at
        self.steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps == self.breaks_at:
            raise RuntimeError("the device is gone")
        names = [plan.request_ids[i] for i in range(len(plan.request_ids)) if plan.samples[i]]
        return StepResult(step=plan.step, tokens=dict.fromkeys(names, 123_456 + self.steps))


def fixed_core(recovery: Recovery, device: Fixed | None = None, **options: Any) -> EngineCore:
    layout = roomy_layout(5)
    scheduler = Scheduler(layout, max_num_batched_tokens=8, max_num_seqs=4, **options)
    return EngineCore(scheduler, device or Fixed(), recovery=recovery)


def ask(core: EngineCore, name: str, tokens: int = 4, **options: Any) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, stop_token_ids=(111_111,))
    request = Request(
        request_id=name,
        prompt_token_ids=[987_001, 987_002, 987_001, 987_003],
        params=params,
        eos_token_ids=frozenset({99_999}),
        **options,
    )
    core.add(request)
    return request


def break_once(core: EngineCore) -> None:
    """The scheduler of now breaks at its next step; a new one does not."""

    def broken() -> None:
        raise PlantedError("987001 is a token, and secret-salt a salt")

    core.scheduler.schedule = broken  # type: ignore[method-assign]


def test_a_dump_tells_nothing_of_what_was_asked(tmp_path: Path) -> None:
    secret, digest = 0x5EC12E7, b"digest-of-a-checkpoint"
    core = fixed_core(Recovery(dumps=tmp_path), hash_seed=secret, model_digest=digest)
    ask(core, "secret-name", cache_salt="secret-salt")
    ask(core, "other-name", cache_salt="secret-salt", priority=3, marks=(2,))
    core.step()
    core.step()
    break_once(core)
    core.step()
    (dump,) = tmp_path.iterdir()
    text = gzip.decompress(dump.read_bytes()).decode()
    numbers = {int(number) for number in re.findall(r"\d+", text)}
    assert not numbers & {987_001, 987_002, 987_003, 111_111, 99_999, secret}
    assert not numbers & set(range(123_456, 123_466))
    for word in ("secret", "other-name", digest.decode(), digest.hex(), "a salt"):
        assert word not in text
    # Equality is what is kept, of tokens and of salts.
    first, second = read(dump).requests
    assert first.prompt == second.prompt == (0, 1, 0, 2)
    assert first.salt == second.salt == 1
    assert (second.priority, second.marks) == (3, (2,))
    assert len(first.outputs[0][1]) >= 1


@pytest.mark.parametrize(
    ("times", "dead"), [((0, 30, 60), True), ((0, 30, 61), False), ((0, 30, 61, 80), True)]
)
def test_the_third_within_a_minute_is_the_last(
    times: tuple[float, ...], dead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    core = fixed_core(Recovery(clock=clock))
    request = ask(core, "one", tokens=20)
    for number, when in enumerate(times, 1):
        clock.now = 1000 + when
        break_once(core)
        if dead and number == len(times):
            with pytest.raises(EngineDeadError, match="PlantedError"):
                core.step()
        else:
            assert core.step() == []
            assert len(core.step()) <= 1
    if not dead:
        while core.has_work:
            core.step()
        assert len(request.output_token_ids) == 20
        assert core.recovery.count == len(times)
        return
    assert "so the engine stops" in caplog.text
    for again in (core.step, lambda: ask(core, "two")):
        with pytest.raises(EngineDeadError):
            again()
    assert not core.abort("one")


def test_a_record_has_a_bound_and_says_that_it_is_cut(tmp_path: Path) -> None:
    limit = 40_000
    core = fixed_core(Recovery(dumps=tmp_path, record_bytes=limit))
    largest = 0
    for number in range(300):
        ask(core, f"r{number}")
        for _ in range(2):
            core.step()
            kept = core._recorder
            largest = max(
                largest, len(kept._kept) * 1024 + sum(len(s.calls) for s in kept._segments)
            )
    assert limit / 3 < largest < 1.2 * limit
    break_once(core)
    core.step()
    (dump,) = tmp_path.iterdir()
    record = read(dump)
    assert not record.complete and record.missing > 500
    # It can be run all the same, from the requests that were on their way.
    assert any(one.begun for one in record.requests)
    assert replay(record, check=True).error is None


def test_dumps_are_for_their_owner_only_and_few(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dumps"
    for number in range(MAX_DUMPS + 3):
        path = write_dump(folder, f"[{number}]")
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    left = [json.loads(gzip.decompress(one.read_bytes()))[0] for one in sorted(folder.iterdir())]
    assert left == list(range(3, MAX_DUMPS + 3))


def test_where_no_dump_can_be_written_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    core = fixed_core(Recovery(dumps=tmp_path / "file"))
    request = ask(core, "one")
    break_once(core)
    while core.has_work:
        core.step()
    assert len(request.output_token_ids) == 4
    assert "no dump could be written" in caplog.text


def test_a_crashed_step_whose_receipt_breaks_the_scheduler() -> None:
    core = fixed_core(Recovery(), Fixed(breaks_at=2))
    ask(core, "first")
    core.step()
    other = ask(core, "other", priority=-1)
    operation = Operation((Scheduler, "commit"))
    with planted(operation, at=1, after=False):
        events = core.step()
    assert [type(event.error).__name__ for event in events] == ["StepFailedError"] * len(events)
    assert {event.request_id for event in events} <= {"first", "other"} and events
    assert core.recovery.count == 1
    while core.has_work:
        core.step()
    conserved(core)
    assert other.finished or any(event.request_id == "other" for event in events)


def test_leaving_breaks_the_scheduler_and_nobody_else_notices() -> None:
    core = fixed_core(Recovery())
    one, other = ask(core, "one", tokens=9), ask(core, "other", tokens=9)
    core.step()
    with planted(Operation((KVCacheManager, "free")), at=1, after=True):
        assert core.abort("one")
    assert core.recovery.count == 1
    while core.has_work:
        assert all(event.request_id == "other" for event in core.step())
    assert len(other.output_token_ids) == 9 > len(one.output_token_ids)
    conserved(core)


def test_an_interrupt_inside_the_scheduler_leaves_an_engine_that_works() -> None:
    for operation in (("schedule", True), ("commit", True), ("commit", False)):
        core = fixed_core(Recovery())
        request = ask(core, "one")
        core.step()

        def stop(_: Operation, call: Any, after: bool = operation[1]) -> Any:
            if after:
                call()
            raise KeyboardInterrupt

        with (
            wrapped([Operation((Scheduler, operation[0]))], stop),
            pytest.raises(KeyboardInterrupt),
        ):
            core.step()
        assert core.recovery.count == 0
        while core.has_work:
            core.step()
        assert len(request.output_token_ids) == 4
        conserved(core)


def octavo(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    return int(ended.value.code or 0)


def test_the_command_shows_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operation = Operation((KVCacheManager, "commit"))
    one = lab(2, tmp_path)
    with planted(operation, at=9, after=False):
        one.run()
    (dump,) = tmp_path.iterdir()
    with planted(operation, at=9, after=False):
        assert octavo("--replay", str(dump)) == 1
    shown = capsys.readouterr()
    assert "PlantedError at tests/planted.py:" in shown.out
    assert (
        "PlantedError: planted in KVCacheManager.commit" in shown.err and "Traceback" in shown.err
    )
    # Mended: nothing is raised any more.
    assert octavo("--replay", str(dump), "--check") == 0
    assert "Nothing was raised in " in capsys.readouterr().out
    assert octavo("--replay", str(dump), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["raised"] is None and said["complete"] and said["made"] == said["calls"]


def test_checking_finds_where_it_began(tmp_path: Path) -> None:
    one = lab(2, tmp_path)
    with planted(Operation((KVCacheManager, "commit")), at=9, after=False):
        one.run()
    (dump,) = tmp_path.iterdir()
    record, received = read(dump), 0

    def spoil(_: Operation, call: Any) -> Any:
        nonlocal received
        received += 1
        if received == 4:
            # Shows when two requests write into one row, if ever.
            call.args[0]._free_rows.insert(0, 0)
        return call()

    with wrapped([Operation((KVCacheManager, "receive"))], spoil):
        found = replay(record, check=True)
    assert isinstance(found.error, AssertionError)
    assert record.calls.split()[: found.calls].count("c") == 4


def test_files_that_are_no_dumps_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = fixed_core(Recovery(dumps=tmp_path / "dumps"))
    ask(core, "one")
    break_once(core)
    core.step()
    (dump,) = (tmp_path / "dumps").iterdir()
    whole = dump.read_bytes()
    data = json.loads(gzip.decompress(whole))
    foreign = json.loads(json.dumps(data).replace("octavo.spec.law.", "elsewhere."))
    short = {**data, "record": {**data["record"]}}
    del short["record"]["calls"]
    for content, message in (
        (b"", "no dump"),
        (whole[:-20], "not whole"),
        (b"version https://git-lfs", "no dump"),
        (gzip.compress(b"[1]"), "no record"),
        (gzip.compress(b'{"record": 3, "format": 99}'), "format 99"),
        (gzip.compress(b'{"record": 3, "format": 1}'), "no record"),
        (gzip.compress(json.dumps(foreign).encode()), "not part of octavo"),
        (gzip.compress(json.dumps(short).encode()), "damaged"),
    ):
        dump.write_bytes(content)
        assert octavo("--replay", str(dump)) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1 and str(dump) in shown
    assert octavo("--replay", str(tmp_path / "nowhere")) == 2
    assert "cannot be read" in capsys.readouterr().err
