"""What a request holds, by kind of memory: the parts are the allocator's bytes, and nothing is
missing.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from octavo.cache.report import CacheReport
from octavo.cli.report import kinds_table
from octavo.config import format_size
from octavo.plan.held import PADDING, Held, held_by_kind
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepResult
from tests.plan.configs import GIB, layout_of, model_of

TOKENS = 5000 - 3


def held(name: str, **dtypes: str) -> tuple[CacheReport, tuple[Held, ...], int]:
    """A request of ``TOKENS`` computed tokens: its report, its parts, and the bytes that the pool
    counts as held.
    """
    model = model_of(name, **dtypes)
    layout = layout_of(model, memory=4 * GIB)
    scheduler = Scheduler(
        layout, max_num_batched_tokens=2048, max_num_seqs=1, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    scheduler.add(Request(request_id="r", prompt_token_ids=[0] * TOKENS, params=params))
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(StepResult(step=plan.step, tokens={"r": 5} if plan.samples[0] else {}))
    pool = scheduler.cache.coordinator.pool
    units = sum(
        pool.counts(bucket).held * size for bucket, size in enumerate(layout.arena.page_units)
    )
    report = scheduler.cache.report("r")
    return report, held_by_kind(model.spec, layout, report), units * layout.arena.unit_bytes


@pytest.mark.parametrize(
    "name",
    ["deepseek-v4-flash", "deepseek-v3.2", "gemma-3-27b", "jamba-1.5-mini", "qwen3-next-80b-a3b"],
)
@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
def test_parts_add_up_to_what_the_pool_counts(name: str, kv: str) -> None:
    report, parts, counted = held(name, kv=kv)
    assert report.tokens == TOKENS
    assert sum(part.bytes for part in parts) == report.bytes == counted
    assert sum(part.share for part in parts) == pytest.approx(1)
    assert parts[-1].stream == PADDING and 0 <= parts[-1].share < 0.02


def test_streams_of_deepseek_v4() -> None:
    _, parts, _ = held("deepseek-v4-flash", kv="float8_e4m3fn", indexer="float4_e2m1fn_x2")
    found = {
        (part.stream, part.stride, part.law): (part.kinds, len(part.layers), part.entries)
        for part in parts[:-1]
    }
    assert found == {
        ("window", 1, "window 128"): (("v4_window", "v4_csa", "v4_hca"), 43, 127),
        ("compressed", 4, "everything"): (("v4_csa",), 21, TOKENS // 4),
        ("index", 4, "everything"): (("v4_csa",), 21, TOKENS // 4),
        ("compressor", 1, "tail 4+4"): (("v4_csa",), 21, 4 + TOKENS % 4),
        ("index_compressor", 1, "tail 4+4"): (("v4_csa",), 21, 4 + TOKENS % 4),
        ("compressed", 128, "everything"): (("v4_hca",), 20, TOKENS // 128),
        ("compressor", 1, "tail 128+0"): (("v4_hca",), 20, TOKENS % 128),
    }
    grown = {(part.stream, part.stride): part.bytes for part in parts if part.law == "everything"}
    blocks = -(-TOKENS // 256)
    assert grown == {
        ("compressed", 4): blocks * 64 * 584 * 21,
        ("index", 4): blocks * 64 * 68 * 21,
        ("compressed", 128): blocks * 2 * 584 * 20,
    }


def test_the_table_says_all_of_it() -> None:
    _, parts, _ = held("deepseek-v4-flash")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(kinds_table(parts))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    sparse = next(part for part in parts if (part.stream, part.stride) == ("compressed", 4))
    shown = [*format_size(sparse.bytes).split(), f"{sparse.share:.1%}"]
    assert ["compressed", "1:4", "v4_csa", "everything", "21", "1,249", *shown] in lines
    assert next(line for line in reversed(lines) if line)[0] == PADDING
