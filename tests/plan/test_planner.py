"""``octavo.plan``: published sizes, the JSON that people script against, shards, dtypes, memory,
and wrong input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import pytest

import octavo
from octavo.base import CapacityError, ConfigError, OctavoError, UnsupportedError
from octavo.cache.layout import request_bytes, request_pages
from octavo.plan.capacity import (
    longest_context,
    mix_that_fits,
    pages_fit,
    requests_that_fit,
    waste_at,
)
from octavo.plan.gpus import CACHE_SHARE, GPUS, weight_bits
from octavo.plan.planner import plan
from octavo.plan.report import Plan
from octavo.sched.scheduler import Scheduler
from octavo.spec.hf import load_config
from tests.cache.drive import make_request, run
from tests.plan.configs import CONFIGS, GIB, NAMES, layout_of, model_of, path_of

MILLION = 1 << 20


def at_a_million(name: str, **dtypes: str) -> Plan:
    return plan(path_of(name), context=MILLION, max_model_len=MILLION, **dtypes)


def test_published_sizes_of_deepseek() -> None:
    pro, flash, v32 = (at_a_million(f"deepseek-{name}") for name in ("v4-pro", "v4-flash", "v3.2"))
    assert (pro.slope_bytes_per_token, flash.slope_bytes_per_token, v32.slope_bytes_per_token) == (
        9848,
        6880,
        85888,
    )
    growing = [each.bytes_at[MILLION].growing / GIB for each in (pro, flash, v32)]
    assert [round(each, 3) for each in growing] == [9.617, 6.719, 83.875]
    assert round(growing[2] / growing[0], 2) == 8.72
    small = [
        at_a_million(f"deepseek-v4-{name}", kv_dtype="fp8", indexer_dtype="fp4")
        for name in ("pro", "flash")
    ]
    assert [round(each.bytes_at[MILLION].growing / GIB, 2) for each in small] == [4.91, 3.43]
    entries = {
        stream.bytes_per_entry
        for each in small
        for layer in each.layers
        for stream in layer.streams
    }
    assert {584, 68} <= entries
    v32 = plan(path_of("deepseek-v3.2"), kv_dtype="fp8")
    assert {stream.bytes_per_entry for layer in v32.layers for stream in layer.streams} == {
        656,
        132,
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_planned_consistently(name: str) -> None:
    context = min(32768, model_of(name).spec.max_model_len) - 37
    made = plan(path_of(name), context=context, vs=("uniform", "vllm"))
    layout = layout_of(model_of(name))
    at = made.bytes_at[context]
    assert at.allocated == request_bytes(layout, context) >= at.ideal >= at.growing + at.bounded
    assert (
        made.waste.total == made.memory.cache
        and made.waste.needed == made.requests_that_fit * at.ideal
    )
    assert all(value >= 0 for value in asdict(made.waste).values())
    assert made.requests_that_fit == requests_that_fit(layout, context)
    assert 0 <= at.bounded <= made.fixed_bytes_per_request
    kept = [
        (stream.entries * stream.bytes_per_entry)
        for layer in made.layers
        for stream in layer.streams
    ]
    assert sum(kept) == at.growing + at.bounded
    assert {index for group in made.groups for index in group.layers} == {
        each.index for each in made.layers if each.streams
    }
    assert max(sum(column) for column in zip(*made.curves.values(), strict=True)) > 0
    assert made.uniform is not None and made.uniform.bytes >= at.growing


def test_layers_say_what_decides_them() -> None:
    made = plan(path_of("gemma-3-27b"))
    near, far = made.layers[4], made.layers[5]
    assert (near.kind, far.kind) == ("sliding", "full")
    said = {decision.field: decision.value for decision in near.decided_by}
    assert said == {
        "layer_types[4]": "sliding_attention",
        "sliding_window": 1024,
        "head_dim": 128,
        "num_key_value_heads": 16,
    }
    assert "sliding_window" not in {decision.field for decision in far.decided_by}
    assert [
        decision.given for decision in near.decided_by if decision.field == "layer_types[4]"
    ] == [False]
    shared = plan(path_of("gemma-3n-e4b")).layers[-1]
    assert shared.shares is not None and not shared.streams


def test_json_has_the_documented_names() -> None:
    made = plan(
        path_of("gemma-3-27b"), context=32768, vs=("uniform", "vllm"), mix={4096: 3, 32768: 1}
    )
    values = json.loads(json.dumps(made.to_json()))
    assert {"index", "kind", "streams"} <= set(values["layers"][0])
    assert {"name", "law", "stride", "bytes_per_entry"} <= set(values["layers"][0]["streams"][0])
    assert {"law", "block_tokens", "page_bytes", "layers"} <= set(values["groups"][0])
    at = values["bytes_at"]["32768"]
    assert (at["ideal"], at["allocated"]) == (
        made.bytes_at[32768].ideal,
        made.bytes_at[32768].allocated,
    )
    for name in (
        "slope_bytes_per_token",
        "fixed_bytes_per_request",
        "requests_that_fit",
        "max_context",
        "min_hit_tokens",
        "waste",
    ):
        assert values[name] is not None
    assert (
        values["version"] == 1
        and values["requests_that_fit"] == 27
        and values["min_hit_tokens"] == 16
    )
    with pytest.raises(FrozenInstanceError):
        made.context = 1  # type: ignore[misc]


def test_the_documentation_names_every_field() -> None:
    text = (CONFIGS.parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    missing = [name for name in plan(path_of("llama-3.2-1b")).to_json() if f"`{name}" not in text]
    assert not missing


def test_it_is_called_by_the_package_s_name() -> None:
    assert octavo.plan(load_config(path_of("llama-3.2-1b"))).slope_bytes_per_token == 32768


def test_shards_split_heads_and_replicate_latents() -> None:
    whole, half = (plan(path_of("llama-3.1-8b"), context=4096, tp=tp) for tp in (1, 2))
    assert half.slope_bytes_per_token * 2 == whole.slope_bytes_per_token
    assert (
        plan(path_of("deepseek-v3"), tp=4).slope_bytes_per_token
        == plan(path_of("deepseek-v3")).slope_bytes_per_token
    )
    assert (
        plan(path_of("llama-3.1-8b"), tp=16).slope_bytes_per_token * 8
        == whole.slope_bytes_per_token
    )
    with pytest.raises(ConfigError, match="tp 3 does not divide num_attention_heads 32"):
        plan(path_of("llama-3.1-8b"), tp=3)


def test_dtypes_are_per_stream() -> None:
    wide, narrow = (
        plan(path_of("nemotron-h-8b"), context=4096, state_dtype=dtype)
        for dtype in ("fp32", "bf16")
    )
    assert wide.slope_bytes_per_token == narrow.slope_bytes_per_token
    assert wide.fixed_bytes_per_request > 1.8 * narrow.fixed_bytes_per_request
    assert plan(path_of("llama-3.1-8b"), kv_dtype="fp8").slope_bytes_per_token == 65536


def test_gpus_leave_what_weights_do_not_take() -> None:
    made = plan(path_of("llama-3.1-8b"), gpu="h200", count=8, tp=2, context=4096)
    memory = made.memory
    assert memory.parameters == 8_030_261_248 and memory.weights == 2 * 8_030_261_248
    assert memory.cache == int((GPUS["h200"] - 8_030_261_248) * CACHE_SHARE) and (
        memory.tp,
        memory.replicas,
    ) == (2, 4)
    assert (
        made.requests_that_fit
        == 4
        * plan(path_of("llama-3.1-8b"), memory=memory.cache, tp=2, context=4096).requests_that_fit
    )
    told = plan(path_of("deepseek-v3"), gpu="h200", count=8, weights="640GiB")
    assert told.memory.tp == 8 and told.memory.weights == 640 * GIB
    with pytest.raises(CapacityError, match="raise count and tp"):
        plan(path_of("deepseek-v3"), gpu="h200", weights="640GiB")
    assert (
        weight_bits({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}})
        == 4.5
    )
    assert (
        weight_bits({"quantization_config": {"quant_method": "fp8"}}) == 8
        and weight_bits({"dtype": "float32"}) == 32
    )
    with pytest.raises(UnsupportedError, match="'strange' does not say"):
        weight_bits({"quantization_config": {"quant_method": "strange"}})


def test_the_share_is_the_engine_s() -> None:
    pytest.importorskip("torch")
    from octavo.engine.build import GPU_SHARE

    assert GPU_SHARE == CACHE_SHARE


def test_weights_beside_the_config_are_weighed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(path_of("llama-3.2-1b").read_bytes())
    for part in range(2):
        (tmp_path / f"model-{part}.safetensors").write_bytes(bytes(1000))
    assert plan(tmp_path, gpu="l4").memory.weights == 2000
    assert plan(tmp_path / "config.json", gpu="l4").memory.weights == 2000


def test_longest_context_and_mixes_stand_at_the_border() -> None:
    layout = layout_of(model_of("gemma-3-27b"), memory=20 * GIB)
    for requests in (1, 3, 20):
        longest = longest_context(layout, requests)
        assert requests_that_fit(layout, longest) >= requests
        assert longest == layout.max_model_len or requests_that_fit(layout, longest + 1) < requests
    assert longest_context(layout, 10_000) == 0
    mix = mix_that_fits(layout, {4096: 3, 32768: 1})
    short, long = (request_pages(layout, n) for n in (4096, 32768))

    def together(groups: int) -> list[int]:
        return [groups * (3 * a + b) for a, b in zip(short, long, strict=True)]

    assert pages_fit(layout, together(mix.requests // 4)) and not pages_fit(
        layout, together(mix.requests // 4 + 1)
    )
    assert mix.shares == {4096: 0.75, 32768: 0.25}
    assert requests_that_fit(layout, 32768) < mix.requests < requests_that_fit(layout, 4096)
    assert mix_that_fits(layout, {4096: 5}).requests == requests_that_fit(layout, 4096)


@pytest.mark.parametrize(
    "name", ["gemma-3-27b", "jamba-1.5-mini", "deepseek-v4-flash", "llama-4-scout"]
)
def test_the_smallest_prefix_that_can_hit_does_and_a_smaller_one_does_not(name: str) -> None:
    least = plan(path_of(name), memory="4GiB").min_hit_tokens
    scheduler = Scheduler(
        layout_of(model_of(name), memory=4 * GIB), max_num_batched_tokens=100, max_num_seqs=2
    )
    for request, shared in (("first", least), ("hits", least), ("misses", least - 1)):
        asked = make_request(request, [3] * shared + [len(request)] * 9)
        scheduler.add(asked)
        run(scheduler)
        assert asked.num_cached_tokens == (least if request == "hits" else 0)


def test_waste_of_an_arena_that_holds_nothing_is_all_free() -> None:
    layout = layout_of(model_of("llama-3.1-8b"), memory=GIB)
    waste = waste_at(layout, 131072, memory=GIB)
    assert waste.needed == 0 and waste.total == GIB == waste.free_slabs + waste.arena_tail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "-5GiB"}, "memory '-5GiB' is not a size"),
        ({"memory": -1}, "memory must be at least one byte"),
        ({"memory": "64KiB"}, "give more|least"),
        ({"kv_dtype": "int3"}, "kv dtype 'int3'"),
        ({"indexer_dtype": "fp2"}, "indexer dtype 'fp2'"),
        ({"state_dtype": "fp8"}, "state dtype"),
        ({"context": 0}, "context must be at least 1"),
        ({"context": 1 << 40}, "beyond the model's limit"),
        ({"gpu": "abacus"}, "gpu 'abacus' is not known"),
        ({"gpu": "h100", "memory": "1GiB"}, "not both"),
        ({"gpu": "h100", "count": 3, "tp": 2}, "multiple of tp"),
        ({"count": 2}, "give gpu"),
        ({"weights": "1GiB"}, "give gpu"),
        ({"tp": 0}, "tp"),
        ({"profile": "tpu"}, "profile 'tpu'"),
        ({"vs": ("paper",)}, "vs 'paper'"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"mix": {4096: -1}}, "positive shares"),
        ({"mix": {1 << 40: 1}}, "model's own limit"),
    ],
)
def test_wrong_options_are_named_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(OctavoError, match=message) as raised:
        plan(path_of("llama-3.2-1b"), **options)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'dreamformer'"):
        plan({"model_type": "dreamformer", "hidden_size": 64, "num_hidden_layers": 2})


def test_no_torch_and_under_a_second() -> None:
    code = (
        "import sys, octavo\n"
        f"octavo.plan({str(path_of('deepseek-v4-pro'))!r}, vs=('uniform', 'vllm'))\n"
        "assert not {'torch', 'rich', 'transformers'} & set(sys.modules), 'heavy'"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=CONFIGS.parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Generous, so that a busy machine does not fail it; alone it is about 0.4 s.
    assert time.perf_counter() - began < 10
