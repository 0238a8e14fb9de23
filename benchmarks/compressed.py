"""Decoding with DeepSeek-V4's attention on the CPU by context: sparse, the same engine dense, and
Transformers.

Owns sizes (a random model of V4's shape, with its head sizes, ratios, window, top-k and index
heads), random caches and the table. A request of each context is planned by the real scheduler;
none of its prompt is computed, since how long a decode takes does not depend on what lies in its
pages. Times are medians of steps in which all contestants take turns, so that a busy machine slows
all. Bytes are counted where torch copies them out of pages; compiled kernels read the same ones
where they lie.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from octavo.cache.layout import PROFILES, solve_layout
from octavo.nn.decoder import resolve
from octavo.nn.module import bind
from octavo.nn.step import Caches, Step
from octavo.ops.paged import CacheView, FieldView
from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH
from octavo.runner.runner import Runner
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, read_spec
from octavo.spec.kind import Config

CONTEXTS = (4096, 16384, 65536, 131072)
ARENA = 3 << 30
CONFIG: Config = {
    "model_type": "deepseek_v4",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 4, 128, 4, 128, 4],
    "num_hash_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 512,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}


def weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Random values for every weight of a model on the meta device."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        if weight.dtype == torch.int64:
            yield name, torch.randint(CONFIG["n_routed_experts"], weight.shape, generator=generator)
        else:
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
            noise = torch.randn(weight.shape, generator=generator) * scale
            yield name, noise + 1 if name.endswith("norm.weight") else noise


def make_runner(dtype: torch.dtype) -> tuple[Runner, int]:
    """A runner with a full arena of random entries, and how many weights it has."""
    families = find_families()
    spec = read_spec(CONFIG, families=families)
    family = families.named(spec.family)
    groups = make_groups(spec, str(dtype).removeprefix("torch."))
    layout = solve_layout(
        groups,
        arena_bytes=ARENA,
        profile=PROFILES["cpu"],
        hash_unit=spec.hash_unit,
        max_model_len=spec.max_model_len,
    )
    empty = resolve(family.module)(spec, dtype=dtype, device="meta")
    runner = Runner(spec=spec, family=family, layout=layout, weights=weights(empty), dtype=dtype)
    # Two random bfloat16 side by side are a random float32, too.
    runner.arena.buffer.view(torch.bfloat16).normal_(generator=torch.Generator().manual_seed(1))
    return runner, sum(weight.numel() for weight in empty.parameters())


def decode_of(runner: Runner, context: int) -> StepPlan:
    """The step that computes the last of ``context`` tokens, all others of which count as
    computed.
    """
    scheduler = Scheduler(
        runner.layout,
        max_num_batched_tokens=8192,
        max_num_seqs=1,
        max_model_len=context + 8,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    scheduler.add(Request(request_id="a", prompt_token_ids=[7] * (context - 1), params=params))
    while True:
        plan = scheduler.schedule()
        assert plan is not None, "the request has not ended"
        if plan.num_tokens == 1 and int(plan.start[0]) == context - 1:
            return plan
        scheduler.commit(StepResult(step=plan.step, tokens={"a": 7} if plan.samples[0] else {}))


def dense(layer: Any) -> Callable[..., tuple[CacheView, None]]:
    """What makes a layer with an indexer read all of its entries."""

    def compressed(
        hidden: Tensor, _: Tensor, __: object, step: Step, caches: Caches
    ) -> tuple[CacheView, None]:
        layer.compressor(hidden, step, caches["compressor"], caches["compressed"])
        return caches["compressed"], None

    return compressed


def run(runner: Runner, plan: StepPlan, *, sparse: bool) -> None:
    """One decode."""
    layers: list[Any] = [layer.self_attn for layer in runner.model.model.layers]
    changed = (
        []
        if sparse
        else [layer for layer in layers if hasattr(getattr(layer, "compressor", None), "indexer")]
    )
    for layer in changed:
        layer.compressed = dense(layer)
    runner.execute(plan)
    for layer in changed:
        del layer.compressed


def bytes_read(runner: Runner, plan: StepPlan, *, sparse: bool) -> Counter[str]:
    """Bytes copied out of pages in one decode: ``chosen`` and ``heavy`` entries, ``index`` keys,
    and what is ``bounded``.
    """
    read: Counter[str] = Counter()
    streams, originals = runner._streams, []

    class Counted(FieldView):
        stream = ""

        def gather_head(self, pages: Tensor, head: int) -> Tensor:
            found = super().gather_head(pages, head)
            read[self.stream] += found.nbytes
            return found

        def take(self, pages: Tensor, rows: Tensor, ops: Ops) -> Tensor:
            found = super().take(pages, rows, ops)
            read[self.stream] += found.nbytes
            return found

    for of_layer in streams.values():
        names = {"index": "index", "compressed": "chosen" if "index" in of_layer else "heavy"}
        for stream, (_, over) in (
            (names.get(name, "bounded"), found) for name, found in of_layer.items()
        ):
            fields: Any = over.fields
            originals.append((fields, dict(fields)))
            for name, view in fields.items():
                fields[name] = type(stream, (Counted,), {"stream": stream})(view.data, view.headed)
    bind(runner.model, TORCH)
    run(runner, plan, sparse=sparse)
    bind(runner.model, runner.ops)
    for fields, views in originals:
        fields.update(views)
    return read


class Upstream:
    """The same sizes in Transformers, with caches made by hand."""

    def __init__(self, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        given = {key: value for key, value in CONFIG.items() if key != "rope_scaling"}
        name = given.pop("model_type")
        given["compress_ratios"] = [*given["compress_ratios"], 0][: given["num_hidden_layers"]]
        scaling = {**CONFIG["rope_scaling"], "rope_type": "yarn"}
        scaling.pop("type")
        config = AutoConfig.for_model(name, **given, rope_parameters=scaling)
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=dtype
        ).eval()
        self.dtype = dtype

    def cache(self, context: int) -> Any:
        """A cache that stands behind ``context - 1`` tokens."""
        from transformers import DynamicCache

        cache, config = DynamicCache(config=self.model.config), self.model.config
        for layer in cache.layers:
            layer.keys = torch.randn(
                1, 1, config.sliding_window - 1, config.head_dim, dtype=self.dtype
            )
            layer.values, layer.is_initialized, layer.cumulative_length = (
                layer.keys,
                True,
                context - 1,
            )
            layer.dtype, layer.device = self.dtype, layer.keys.device
            for name in getattr(layer, "compressed_kv", {}):
                dim = config.head_dim if name == "compressor" else config.index_head_dim
                count, rest = divmod(context - 1, layer.compress_rate)
                wide = dim * (2 if hasattr(layer, "overlap_kv") else 1)
                layer.compressed_kv[name] = torch.randn(1, count, dim, dtype=self.dtype)
                layer.entry_count[name] = count
                layer.buffer_kv[name] = torch.randn(1, rest, wide, dtype=self.dtype)
                layer.buffer_gate[name] = torch.randn(1, rest, wide, dtype=self.dtype)
                if hasattr(layer, "overlap_kv"):
                    layer.overlap_kv[name] = torch.randn(
                        1, layer.compress_rate, dim, dtype=self.dtype
                    )
                    layer.overlap_gate[name] = torch.randn(
                        1, layer.compress_rate, dim, dtype=self.dtype
                    )
        return cache

    @torch.inference_mode()
    def run(self, cache: Any) -> None:
        """One decode behind what the cache has by now."""
        place = torch.tensor([[cache.get_seq_length()]])
        self.model(torch.tensor([[7]]), past_key_values=cache, position_ids=place, use_cache=True)


def timed(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    spent: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, step in work.items():
            begin = time.perf_counter()
            step()
            if number:
                spent[name].append(1000 * (time.perf_counter() - begin))
    return {name: median(times) for name, times in spent.items()}


def main(
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16, of weights and caches.")
    ] = "float32",
    repeats: Annotated[int, typer.Option(help="Steps per median.")] = 5,
    upstream: Annotated[bool, typer.Option(help="Also run Transformers.")] = True,
    out: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Print a row per context."""
    torch.manual_seed(0)
    (runner, size), theirs = (
        make_runner(getattr(torch, dtype)),
        Upstream(getattr(torch, dtype)) if upstream else None,
    )
    rows: list[dict[str, Any]] = []
    for context in CONTEXTS:
        plan = decode_of(runner, context)
        work: dict[str, Callable[[], object]] = {
            "sparse": partial(run, runner, plan, sparse=True),
            "dense": partial(run, runner, plan, sparse=False),
        }
        if theirs is not None:
            work["transformers"] = partial(theirs.run, theirs.cache(context))
        row: dict[str, Any] = {"context": context, "ms": timed(work, repeats)}
        row["bytes"] = {
            name: dict(bytes_read(runner, plan, sparse=name == "sparse"))
            for name in ("sparse", "dense")
        }
        rows.append(row)
    Console(width=110).print(
        table(
            rows,
            f"One decoded token, {size / 1e6:.0f} M weights, {dtype}, {torch.get_num_threads()}"
            " threads",
        )
    )
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Times, and megabytes of entries (c4a chosen and all, c128a), index keys, and windows with
    open groups.
    """
    made = Table(title=title)
    for name in (
        "context",
        "sparse ms",
        "dense ms",
        "HF ms",
        "c4a MB",
        "dense c4a",
        "index MB",
        "c128a MB",
        "bounded MB",
    ):
        made.add_column(name, justify="right")
    for row in rows:
        sparse, full = row["bytes"]["sparse"], row["bytes"]["dense"]
        times = [row["ms"].get(name) for name in ("sparse", "dense", "transformers")]
        sizes = [
            sparse["chosen"],
            full["chosen"],
            *(sparse.get(name, 0) for name in ("index", "heavy", "bounded")),
        ]
        cells = ["-" if value is None else f"{value:.1f}" for value in times]
        made.add_row(f"{row['context']:,}", *cells, *(f"{value / 1e6:.2f}" for value in sizes))
    return made


if __name__ == "__main__":
    typer.run(main)
