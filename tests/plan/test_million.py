"""A request of a million tokens on DeepSeek-V4's real configs: what is planned, what is admitted,
and every step of it.

Expected sizes are written out from the model's description: elements per entry, tokens per entry,
four bytes for compressors' states and two for all else.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from octavo.base import CapacityError
from octavo.cache.layout import request_bytes
from octavo.plan.planner import plan
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sim.fake import FakeRunner
from octavo.spec.stream import full_dtype
from tests.plan.configs import GIB, layout_of, model_of, path_of

MILLION = 1 << 20
SPARSE, HEAVY = 4, 128

PER_LAYER = {
    ("window", 1): 128 * 512 * 2,
    ("compressed", SPARSE): 512 * 2 / 4,
    ("index", SPARSE): 128 * 2 / 4,
    ("compressed", HEAVY): 512 * 2 / 128,
    ("compressor", SPARSE): 8 * 2 * 512 * 2 * 4,
    ("index_compressor", SPARSE): 8 * 2 * 128 * 2 * 4,
    ("compressor", HEAVY): 128 * 512 * 2 * 4,
}
"""Bytes of one layer, by stream and tokens per entry of the layer: in all for what is let go, per
token for what stays.
"""

LAYERS = {"deepseek-v4-flash": (43, 21, 20), "deepseek-v4-pro": (61, 30, 31)}
"""All layers, those that compress by 4, those that compress by 128."""


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_state_has_the_size_that_the_model_gives_it(name: str) -> None:
    model = model_of(name)
    found: dict[tuple[str, int], set[float]] = defaultdict(set)
    layers: dict[tuple[str, int], int] = defaultdict(int)
    for layer in model.spec.layers:
        streams = [
            stream
            for group in model.groups
            for m in group.members
            if m.layer == layer.index
            for stream in [m.stream]
        ]
        ratio = max(stream.stride for stream in streams)
        for stream in streams:
            law, size = stream.law, stream.entry_bytes
            key = (stream.name, 1 if stream.name == "window" else ratio)
            found[key].add(size / stream.stride if law.prefix is None else size * law.span)
            layers[key] += 1
    assert {key: set(sizes) for key, sizes in found.items()} == {
        key: {size} for key, size in PER_LAYER.items()
    }
    every, sparse, heavy = LAYERS[name]
    assert {key: count for key, count in layers.items() if key[1] == 1} == {("window", 1): every}
    assert {count for key, count in layers.items() if key[1] == SPARSE} == {sparse}
    assert {count for key, count in layers.items() if key[1] == HEAVY} == {heavy}


@pytest.mark.parametrize(
    ("name", "growing", "fixed"),
    [("deepseek-v4-flash", 6880, 17.016), ("deepseek-v4-pro", 9848, 25.469)],
)
def test_a_million_tokens_need_what_their_entries_add_up_to(
    name: str, growing: int, fixed: float
) -> None:
    groups = model_of(name).groups
    bounded = [group for group in groups if group.law.prefix is not None]
    assert (
        sum(group.bytes_needed(MILLION) for group in groups if group.law.prefix is None)
        == growing * MILLION
    )
    span = sum(
        member.stream.entry_bytes * group.law.span for group in bounded for member in group.members
    )
    assert span / 2**20 == pytest.approx(fixed, abs=1e-3)


@pytest.mark.parametrize(
    ("kv", "index", "gib"), [("bf16", "bf16", 6.72), ("fp8", "fp8", 3.76), ("fp8", "fp4", 3.43)]
)
def test_quantised_entries_make_a_million_tokens_smaller(kv: str, index: str, gib: float) -> None:
    dtypes = {"kv": full_dtype(kv), "indexer": full_dtype(index)}
    groups = model_of("deepseek-v4-flash", **dtypes).groups
    grown = sum(group.bytes_needed(MILLION) for group in groups if group.law.prefix is None)
    assert grown / GIB == pytest.approx(gib, abs=0.005)
    planned = plan(
        path_of("deepseek-v4-flash"),
        context=MILLION,
        memory=8 * GIB,
        kv_dtype=kv,
        indexer_dtype=index,
    )
    assert planned.requests_that_fit == (1 if kv == "bf16" else 2)
    assert planned.bytes_at[MILLION].allocated == request_bytes(
        layout_of(model_of("deepseek-v4-flash", **dtypes), memory=8 * GIB), MILLION
    )


def test_a_million_tokens_are_planned_admitted_and_walked_through() -> None:
    """Every read of every step is checked against the truth; what is held at the end is what was
    planned.
    """
    planned = plan(path_of("deepseek-v4-flash"), context=MILLION, memory=8 * GIB)
    layout, decoded = layout_of(model_of("deepseek-v4-flash"), memory=8 * GIB), 5
    params = SamplingParams(temperature=0, max_tokens=decoded, ignore_eos=True)
    scheduler = Scheduler(
        layout, max_num_batched_tokens=8192, max_num_seqs=2, enable_prefix_caching=False
    )
    runner, prompt = FakeRunner(layout), [0] * (MILLION - decoded)
    runner.register("million", prompt, params)
    request = Request(request_id="million", prompt_token_ids=prompt, params=params)
    scheduler.add(request)
    pool, held, steps = scheduler.cache.coordinator.pool, 0, 0
    while not request.finished:
        step = scheduler.schedule()
        assert step is not None
        held = sum(
            pool.counts(bucket).held * units for bucket, units in enumerate(layout.arena.page_units)
        )
        scheduler.commit(runner.execute(step))
        runner.settle(step.step)
        steps += 1
    assert steps == MILLION // 8192 + decoded - 1
    assert held * layout.arena.unit_bytes == planned.bytes_at[MILLION].allocated
    assert request.output_token_ids == runner.truths["million"].output(decoded)
    assert runner.entries_read > MILLION * MILLION // 8192 // 2


def test_a_million_tokens_that_do_not_fit_are_refused_at_once() -> None:
    layout = layout_of(model_of("deepseek-v4-flash"), memory=6 * GIB)
    scheduler = Scheduler(layout, max_num_batched_tokens=8192, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(CapacityError):
        scheduler.add(
            Request(request_id="million", prompt_token_ids=[0] * (MILLION - 1), params=params)
        )
