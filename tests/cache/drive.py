"""Drives a real scheduler without a model: every step's receipt says the same token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.cache.layout import CPU, CacheLayout, solve_layout
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.spec.group import Group, Member
from octavo.spec.law import Everything, Law, Window
from octavo.spec.stream import Field, Stream


def group(
    law: Law, *, layers: Sequence[int], heads: int = 1, head_dim: int = 256, dtype: str = "bfloat16"
) -> Group:
    """Layers that keep K and V by one law."""
    fields = tuple(
        Field(name=name, shape=(heads, head_dim), dtype=dtype, shard="heads") for name in "kv"
    )
    stream = Stream(name="kv", law=law, fields=fields)
    return Group(
        law=law,
        members=tuple(Member(layer=layer, mixer="self_attn", stream=stream) for layer in layers),
    )


def gemma_groups() -> tuple[Group, ...]:
    """Gemma 3 270M: 15 layers with a window of 512, 3 full ones."""
    full = (5, 11, 17)
    return group(Window(512), layers=[i for i in range(18) if i not in full]), group(
        Everything(), layers=full
    )


def gemma_layout(*, arena_bytes: int = 1 << 30, max_model_len: int = 32768) -> CacheLayout:
    """Gemma 3 270M on the CPU profile."""
    return solve_layout(
        gemma_groups(),
        arena_bytes=arena_bytes,
        profile=CPU,
        hash_unit=16,
        max_model_len=max_model_len,
    )


def make_request(
    name: str, tokens: Sequence[int], *, max_tokens: int = 4, **more: object
) -> Request:
    """A greedy request."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=tokens, params=params, **more)  # type: ignore[arg-type]


def run(
    scheduler: Scheduler,
    *,
    look: Callable[[StepPlan], None] = lambda plan: None,
    steps: int = 10_000,
) -> int:
    """Run to the end, looking at every plan before its receipt; returns the steps it took."""
    for step in range(steps):
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            return step
        look(plan)
        names = [
            name
            for name, samples in zip(plan.request_ids, plan.samples.tolist(), strict=True)
            if samples
        ]
        scheduler.commit(StepResult(step=plan.step, tokens=dict.fromkeys(names, 7)))
    raise AssertionError(f"not finished after {steps} steps")
