"""Decoding with sparse latent attention on the CPU, beside the same layer run dense: time, and
bytes read, by context.

Owns sizes (DeepSeek-V3.2's heads, latents and index keys; fewer heads, a smaller hidden size),
random caches and the table. Times are medians of steps that alternate between the two, so that a
busy machine slows both. A step is one token of one request in one layer; nothing else of a model
depends on the context. Bytes are counted where torch copies them out of pages; compiled kernels
read the same ones where they lie. The indexer stands beside its bound: a product of as many keys
and heads in float32, as fast as torch's matrix product is on keys that caches hold. ``--busy``
counts the thread's own time, for busy machines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from octavo.kinds.dsa.layer import SparseLatentLayer
from octavo.kinds.dsa.spec import SparseLatent
from octavo.nn.module import bind
from octavo.nn.step import Step
from octavo.ops.backends import ops_for
from octavo.ops.latents import Queries
from octavo.ops.paged import CacheView, FieldView, StreamView
from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH
from octavo.runner.batch import make_reads, make_step
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.latent import LatentParams
from octavo.spec.law import Everything
from octavo.spec.rope import RopeParams
from octavo.spec.stream import CacheDtypes

BLOCK = 64
BOUND_KEYS = 4096
CONTEXTS = (4096, 16384, 65536, 131072)
CPU = torch.device("cpu")


def kind_of(topk: int) -> SparseLatent:
    """V3.2's layer with 16 of 128 heads and a hidden size of 2,048."""
    rope = RopeParams(theta=10000.0, interleaved=True)
    latent = LatentParams(
        hidden_size=2048,
        num_heads=16,
        kv_lora_rank=512,
        rope_dim=64,
        nope_dim=128,
        value_dim=128,
        q_lora_rank=768,
        rope=rope,
    )
    return SparseLatent(latent=latent, index_heads=64, index_dim=128, index_topk=topk)


@dataclass
class Reads:
    """Bytes copied out of pages."""

    total: int = 0

    def of(self, view: FieldView) -> FieldView:
        """The same field, counted."""
        reads = self

        class Counted(FieldView):
            def gather_head(self, pages: Tensor, head: int) -> Tensor:
                return reads.add(super().gather_head(pages, head))

            def take(self, pages: Tensor, rows: Tensor, ops: Ops) -> Tensor:
                return reads.add(super().take(pages, rows, ops))

        return Counted(view.data, view.headed)

    def add(self, copied: Tensor) -> Tensor:
        """Count a copy."""
        self.total += copied.nbytes
        return copied


def plan_of(context: int) -> StepPlan:
    """One request's token behind ``context - 1`` others, whose pages lie in no order."""
    pages = np.random.default_rng(0).permutation(context // BLOCK).astype(np.int32)
    last = context - 1
    group = GroupStep(
        table=pages[None],
        rows=np.zeros(1, dtype=np.int32),
        fixed=None,
        turning=0,
        block_tokens=BLOCK,
        fresh=np.zeros(1, dtype=bool),
        write_page=pages[-1:],
        write_row=np.array([last % BLOCK], dtype=np.int32),
    )
    return StepPlan(
        step=1,
        request_ids=("a",),
        token_ids=np.zeros(1, dtype=np.int32),
        query_start=np.array([0, 1], dtype=np.int32),
        start=np.array([last], dtype=np.int32),
        stop=np.array([context], dtype=np.int32),
        samples=np.ones(1, dtype=bool),
        sampling=(SamplingParams(),),
        output_len=np.zeros(1, dtype=np.int32),
        branch=np.zeros(1, dtype=np.int32),
        groups=(group,),
    )


@dataclass
class Scene:
    """One layer, and random entries of ``context`` tokens in pages."""

    context: int
    topk: int
    dtype: torch.dtype
    layer: SparseLatentLayer = field(init=False)
    step: Step = field(init=False)
    caches: dict[str, CacheView] = field(init=False)
    scored: tuple[Tensor, Tensor] = field(init=False)
    ops: Ops = field(init=False)
    bound_keys: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        kind, plan = kind_of(self.topk), plan_of(self.context)
        self.layer, self.step = SparseLatentLayer(kind, self.dtype, CPU), make_step(plan, CPU)
        self.ops = ops_for(CPU, self.dtype)
        bind(self.layer, self.ops)
        reads = make_reads(self.step.parts, plan.groups[0], Everything())
        self.caches = {}
        for stream in kind.streams(CacheDtypes(kv=str(self.dtype).removeprefix("torch."))):
            shape = (self.context // BLOCK, 1, BLOCK)
            fields = {
                f.name: FieldView(torch.randn(*shape, *f.shape, dtype=self.dtype), headed=False)
                for f in stream.fields
            }
            over = StreamView(stream, fields)
            self.caches[stream.name] = CacheView(over=over, reads=reads, ops=self.ops)
        self.hidden = torch.randn(1, kind.latent.hidden_size, dtype=self.dtype)
        self.source = self.layer.source(self.hidden)
        plain, rotated = self.layer.queries(self.source, self.step)
        self.dense = Queries(plain=plain, rotated=rotated)
        self.sparse = replace(self.dense, chosen=self.index())
        assert self.layer.indexer is not None
        self.scored = self.layer.indexer.queries(self.hidden, self.source, self.step)
        self.bound_keys = (
            torch.randn(BOUND_KEYS, kind.index_dim),
            torch.randn(kind.index_dim, kind.index_heads),
        )

    def counted(self, stream: str, reads: Reads) -> CacheView:
        """A stream whose reads are counted."""
        view = self.caches[stream]
        fields = {name: reads.of(kept) for name, kept in view.fields.items()}
        return replace(view, over=StreamView(view.over.stream, fields), fresh={})

    def index(self, view: CacheView | None = None) -> Tensor | None:
        """The tokens chosen."""
        assert self.layer.indexer is not None
        found: Tensor | None = self.layer.indexer(
            self.hidden, self.source, self.step, view or self.caches["index"]
        )
        return found

    def pick(self) -> Tensor:
        """What ``index`` does behind its projections: scores, and the choice."""
        return self.ops.score_and_choose(*self.scored, self.caches["index"], self.topk)

    def bound(self) -> None:
        """Products of all keys and heads."""
        for _ in range(self.context // BOUND_KEYS):
            self.bound_keys[0] @ self.bound_keys[1]

    def attend(self, queries: Queries, view: CacheView | None = None) -> Tensor:
        """Main attention."""
        heads = self.layer.heads
        assert heads is not None, "the layer is bound"
        return self.layer.ops.attend_latent(queries, view or self.caches["latent"], heads)


def timed(
    work: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    spent: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, run in work.items():
            begin = clock()
            run()
            if number:
                spent[name].append(1000 * (clock() - begin))
    return {name: median(times) for name, times in spent.items()}


@torch.no_grad()
def measure(
    context: int, topk: int, dtype: torch.dtype, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Times in milliseconds and bytes of one decoded token in one layer."""
    scene = Scene(context, topk, dtype)
    work: dict[str, Callable[[], object]] = {
        "dense_ms": lambda: scene.attend(scene.dense),
        "sparse_ms": lambda: scene.attend(scene.sparse),
        "index_ms": scene.index,
        "pick_ms": scene.pick,
        "bound_ms": scene.bound,
    }
    found = {"context": float(context), **timed(work, repeats, clock)}
    for name, run in (
        ("dense_bytes", lambda reads: scene.attend(scene.dense, scene.counted("latent", reads))),
        ("sparse_bytes", lambda reads: scene.attend(scene.sparse, scene.counted("latent", reads))),
        ("index_bytes", lambda reads: scene.index(scene.counted("index", reads))),
    ):
        reads = Reads()
        bind(scene.layer, TORCH)
        run(reads)
        bind(scene.layer, scene.ops)
        found[name] = float(reads.total)
    return found


def main(
    topk: Annotated[int, typer.Option(help="Tokens that sparse attention reads.")] = 512,
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16, of weights and caches.")
    ] = "float32",
    repeats: Annotated[int, typer.Option(help="Steps per median.")] = 9,
    busy: Annotated[
        bool, typer.Option(help="Count this thread's own time; for one thread.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Print a row per context."""
    clock = time.thread_time if busy else time.perf_counter
    rows = [measure(context, topk, getattr(torch, dtype), repeats, clock) for context in CONTEXTS]
    table = Table(
        title=(
            f"One decoded token, one layer, {dtype}, top-{topk}, {torch.get_num_threads()} threads"
        )
    )
    titles = (
        "context",
        "dense ms",
        "sparse ms",
        "index ms",
        "sum ms",
        "of bound",
        "dense MB",
        "sparse MB",
        "index MB",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        times = [
            row["dense_ms"],
            row["sparse_ms"],
            row["index_ms"],
            row["sparse_ms"] + row["index_ms"],
        ]
        sizes = [row[f"{name}_bytes"] / 1e6 for name in ("dense", "sparse", "index")]
        share = row["bound_ms"] / row["pick_ms"]
        table.add_row(
            f"{int(row['context']):,}", *(f"{value:.2f}" for value in [*times, share, *sizes])
        )
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
