"""Plans in words: layers that are alike, what a stream keeps, numbers as people read them.

Owns the phrases that tables, page and walk share. Knows plans only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from octavo.config import format_size
from octavo.plan.report import Decision, LayerPlan, Plan, StreamPlan


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Layers that remember the same, by index ascending."""

    layers: tuple[LayerPlan, ...]

    @property
    def first(self) -> LayerPlan:
        """The first of them."""
        return self.layers[0]

    @property
    def name(self) -> str:
        """Their kind; ``no cache`` is added where they read another layer's."""
        return (
            self.first.kind
            if self.first.shares is None
            else f"{self.first.kind}, no cache of its own"
        )

    @property
    def words(self) -> str:
        """What each remembers, one line per stream."""
        shared = sorted({layer.shares for layer in self.layers if layer.shares is not None})
        if shared:
            return f"reads the cache of layer {ranges(shared)}"
        return "\n".join(map(stream_words, self.first.streams)) or "nothing"

    @property
    def indices(self) -> str:
        """Which layers they are."""
        return ranges(layer.index for layer in self.layers)


def alike(plan: Plan) -> tuple[Alike, ...]:
    """The plan's layers sorted by what they remember, in order of first appearance."""
    found: dict[object, list[LayerPlan]] = {}
    for layer in plan.layers:
        found.setdefault((layer.kind, layer.shares is None, layer.streams), []).append(layer)
    return tuple(Alike(layers=tuple(layers)) for layers in found.values())


def ranges(indices: Iterable[int]) -> str:
    """Ascending numbers in short: ``0-4, 6, 8-10``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def stream_words(stream: StreamPlan) -> str:
    """What a stream keeps and how long: ``kv: 4,096 B per token, everything``."""
    per = (
        "once"
        if stream.state
        else "per token"
        if stream.stride == 1
        else f"per {stream.stride} tokens"
    )
    return f"{stream.name}: {stream.bytes_per_entry:,} B {per}, {stream.law}"


def decided(decisions: Iterable[Decision]) -> str:
    """Config fields and values; ``*`` marks class defaults. The place in a list of layers is left
    out.
    """
    shown = ((re.sub(r"\[\d+]$", "[i]", each.field), each) for each in decisions)
    return ", ".join(f"{name}={each.value}{'' if each.given else '*'}" for name, each in shown)


def devices(plan: Plan) -> str:
    """Where the cache's memory comes from."""
    memory = plan.memory
    text = f"{format_size(memory.cache)} of cache"
    if memory.assumed:
        text += " (assumed; give --memory or --gpu)"
    if memory.gpu:
        assert memory.device is not None and memory.weights is not None, "a GPU has both"
        text += (
            f" on each of {memory.tp * memory.replicas} x {memory.gpu}"
            f" ({format_size(memory.device)}; weights {format_size(memory.weights)} over"
            f" {memory.tp})"
        )
    if memory.tp > 1:
        text += f", tensor parallel {memory.tp}: bytes are those of one device"
    return text


WASTE: Final = {
    "needed": "entries at their worst moment",
    "blocks": "rounding outward to blocks",
    "alignment": "between fields of a page",
    "buckets": "rounding pages to units and buckets",
    "slab_tails": "ends of slabs",
    "open_slabs": "places in slabs partly used",
    "free_slabs": "too little for one more request",
    "arena_tail": "behind the last slab",
}


def numbers(plan: Plan) -> Iterator[tuple[str, str]]:
    """Everything that is one number: what, and how much."""
    step, several = plan.step, "s" if plan.requests > 1 else ""
    yield (
        f"allocated for one request of {plan.context:,} tokens",
        format_size(plan.bytes_at[plan.context].allocated),
    )
    yield f"requests of {plan.context:,} tokens that fit", f"{plan.requests_that_fit:,}"
    if plan.mix is not None:
        mix = ", ".join(f"{share:.0%} of {length:,}" for length, share in plan.mix.shares.items())
        yield f"requests that fit of a mix: {mix}", f"{plan.mix.requests:,}"
    yield (
        f"longest context for {plan.requests:,} request{several} at once",
        f"{plan.max_context:,} tokens",
    )
    yield "smallest prefix that can hit", f"{plan.min_hit_tokens:,} tokens"
    yield "pages that a resume point keeps for itself", format_size(plan.resume_point_bytes)
    yield "allocated: fixed per request", format_size(plan.allocated_fixed_bytes_per_request)
    yield "allocated: per token", f"{plan.allocated_slope_bytes_per_token:,.10g} B"
    yield "step: a shared block of every group being copied", format_size(step.copies)
    yield (
        "step: a resume point inside a prompt, beside the ring, at most",
        format_size(step.checkpoint),
    )
    yield (
        f"step: fresh entries of a {step.chunk:,}-token chunk, outside the arena",
        format_size(step.fresh),
    )
    if plan.uniform is not None:
        yield (
            "one request if every layer were charged as full attention",
            format_size(plan.uniform.bytes),
        )
    if plan.vllm is not None and plan.vllm.reason is None:
        yield (
            "requests that vLLM's rules plan, and hold",
            f"{plan.vllm.planned:,.2f}, {plan.vllm.resident:,}",
        )
