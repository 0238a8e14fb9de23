"""vLLM's rules, re-derived, against figures measured with its own KVCacheManager (version 0.32, 80
GiB, prefix caching on).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.plan.planner import plan
from octavo.plan.vllm import compare, plan_streams
from octavo.spec.law import Everything, Snapshot, Window
from octavo.spec.stream import Field, Stream
from tests.plan.configs import FP8, GIB, model_of, path_of

MIB = 2**20

# config, dtypes that the figures were measured with, tokens, planned concurrency, MiB held after
# three decoded tokens.
MEASURED = [
    ("llama-3.1-8b", {}, 4096, 160.00, 514.0),
    ("llama-3.1-8b", {}, 131072, 5.00, 16386.0),
    ("gemma-3-27b", {}, 4096, 36.45, 808.8),
    ("gemma-3-27b", {}, 32768, 7.64, 3048.8),
    ("gemma-3-27b", {}, 131072, 4.45, 10728.8),
    ("gpt-oss-120b", {}, 4096, 283.89, 149.6),
    ("gpt-oss-120b", {}, 131072, 15.79, 4613.6),
    ("llama-4-scout", {}, 4096, 106.67, 771.0),
    ("llama-4-scout", {}, 32768, 16.41, 1539.0),
    ("llama-4-scout", {}, 1048576, 1.56, 49155.0),
    ("jamba-1.5-mini", {"state": "bfloat16"}, 4096, 992.97, 73.8),
    ("jamba-1.5-mini", {"state": "bfloat16"}, 32768, 154.57, 521.2),
    ("bamba-9b", {"state": "bfloat16"}, 4096, 348.39, 111.4),
    ("bamba-9b", {"state": "bfloat16"}, 131072, 47.45, 1602.6),
    ("qwen3-next-80b-a3b", {"state": "bfloat16"}, 4096, 458.93, 140.2),
    ("falcon-h1-7b", {"state": "bfloat16"}, 4096, 202.50, 269.5),
    ("nemotron-h-8b", {}, 4096, 229.14, 162.5),
    ("minimax-text-01-hf", {"state": "bfloat16"}, 1048576, 1.99, 41120.0),
    ("deepseek-v3.2", {"kv": FP8}, 32768, 54.54, 1505.1),
    ("deepseek-v4-flash", {"kv": FP8}, 4096, 50.89, 41.1),
    ("deepseek-v4-flash", {"kv": FP8}, 32768, 12.59, 148.2),
    ("deepseek-v4-flash", {"kv": FP8}, 1048576, 7.95, 3940.8),
    ("gemma-3n-e4b", {}, 4096, 510.40, 48.6),
]

# config, dtypes, tokens, requests really admitted.
RESIDENT = [
    ("llama-3.1-8b", {}, 32768, 19),
    ("gemma-3-27b", {}, 4096, 99),
    ("gemma-3-27b", {}, 131072, 6),
    ("gpt-oss-120b", {}, 32768, 70),
    ("llama-4-scout", {}, 131072, 12),
    ("jamba-1.5-mini", {"state": "bfloat16"}, 32768, 157),
    ("bamba-9b", {"state": "bfloat16"}, 4096, 734),
    ("qwen3-next-80b-a3b", {"state": "bfloat16"}, 131072, 26),
    ("falcon-h1-7b", {"state": "bfloat16"}, 131072, 14),
    ("minimax-text-01-hf", {"state": "bfloat16"}, 131072, 15),
    ("deepseek-v3.2", {"kv": FP8}, 131072, 13),
    ("deepseek-v4-flash", {"kv": FP8}, 4096, 1955),
    ("deepseek-v4-flash", {"kv": FP8}, 131072, 146),
    ("gemma-3n-e4b", {}, 32768, 298),
]

# config, dtypes, bytes of a block of the pool, blocks, tokens by which prefixes hit.
LAYOUTS = [
    ("gemma-3-27b", {}, 1310720, 65536, 16),
    ("gpt-oss-120b", {}, 589824, 145635, 16),
    ("bamba-9b", {"state": "bfloat16"}, 6488064, 13239, 528),
    ("qwen3-next-80b-a3b", {"state": "bfloat16"}, 13369344, 6425, 544),
    ("falcon-h1-7b", {"state": "bfloat16"}, 70647808, 1215, 1568),
    ("nemotron-h-8b", {}, 17039360, 5041, 1040),
    ("deepseek-v3.2", {"kv": FP8}, 3076352, 27922, 64),
    ("deepseek-v4-flash", {"kv": FP8}, 1002240, 85707, 256),
]


def plan_of(name: str, dtypes: dict[str, str], tokens: int, decoded: int):
    model = model_of(name, **dtypes)
    streams = [member.stream for group in model.groups for member in group.members]
    growing = [
        member.layer
        for group in model.groups
        for member in group.members
        if member.stream.law.prefix is None
    ]
    return plan_streams(
        streams, len(growing) > len(set(growing)), tokens, memory=80 * GIB, decoded=decoded
    )


@pytest.mark.parametrize(("name", "dtypes", "tokens", "planned", "held"), MEASURED)
def test_planned_concurrency_and_held_bytes(
    name: str, dtypes: dict[str, str], tokens: int, planned: float, held: float
) -> None:
    found = plan_of(name, dtypes, tokens, 3)
    assert found.reason is None
    assert round(found.planned, 2) == planned
    assert round(found.held_bytes / MIB, 1) == held


@pytest.mark.parametrize(("name", "dtypes", "tokens", "resident"), RESIDENT)
def test_resident_requests(name: str, dtypes: dict[str, str], tokens: int, resident: int) -> None:
    assert plan_of(name, dtypes, tokens, 3).resident == resident


@pytest.mark.parametrize(("name", "dtypes", "block_bytes", "blocks", "hit"), LAYOUTS)
def test_pools(name: str, dtypes: dict[str, str], block_bytes: int, blocks: int, hit: int) -> None:
    found = plan_of(name, dtypes, 4096, 0)
    assert (found.block_bytes, found.num_blocks, found.min_hit_tokens) == (block_bytes, blocks, hit)


def test_caches_are_dealt_out_to_groups() -> None:
    groups = plan_of("gemma-3-27b", {}, 4096, 0).groups
    assert sorted(group.layers for group in groups) == [8, 8, 9, 9, 9, 9, 10]
    assert all(group.page_bytes + group.padded_bytes == 1310720 for group in groups)
    groups = plan_of("deepseek-v4-flash", {"kv": FP8}, 4096, 0).groups
    assert sorted((group.layers, group.block_tokens) for group in groups) == [
        (20, 8),
        (21, 64),
        (22, 64),
        (42, 4),
        (62, 256),
    ]


def test_where_the_rules_do_not_apply_the_reason_is_said() -> None:
    wide, odd = (
        Stream(name="kv", law=law, fields=(Field(name="k", shape=(size,), dtype="uint8"),))
        for law, size in ((Everything(), 96), (Window(8), 64))
    )
    state = replace(odd, law=Snapshot())
    assert "96" in (plan_streams([wide, odd], False, 100, memory=GIB).reason or "")
    assert "states" in (plan_streams([state], False, 100, memory=GIB).reason or "")
    assert "different sizes" in (
        plan_streams([state, wide, odd], False, 100, memory=GIB).reason or ""
    )
    assert compare(model_of("mamba-2.8b"), 4096, memory=GIB).resident == 0


def test_octavo_holds_at_least_what_vllm_holds() -> None:
    for name in ("gemma-3-27b", "gpt-oss-120b", "jamba-1.5-mini", "deepseek-v4-flash"):
        found = plan(path_of(name), context=32768 - 37, vs=("vllm",))
        assert found.vllm is not None and found.requests_that_fit >= found.vllm.resident > 0
