"""Plans as tables for a terminal.

Owns columns and order. Knows plans only; computes nothing but ratios of their numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from octavo.config import format_size
from octavo.plan.report import Plan, VllmPlan
from octavo.plan.words import WASTE, Alike, alike, decided, devices, numbers


def show(plan: Plan, *, every_layer: bool = False) -> RenderableType:
    """Everything a plan says."""
    return Lines(
        *_head(plan),
        layers(plan, every_layer=every_layer),
        groups(plan),
        lengths(plan),
        facts(plan),
        waste(plan),
        *(comparisons(plan)),
    )


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    made = Table(title=f"\n{title}", title_justify="left", title_style="bold")
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _head(plan: Plan) -> Iterator[RenderableType]:
    quantised = ", ".join(f"{what} {dtype}" for what, dtype in plan.dtypes.items())
    name = f"[bold]{escape(plan.model)}[/] ({escape(plan.family)})"
    yield f"{name}: {len(plan.layers)} layers, at most {plan.max_model_len:,} tokens"
    yield f"{devices(plan)}; {plan.profile} profile; dtypes: {quantised}"
    fixed, slope = plan.fixed_bytes_per_request, plan.slope_bytes_per_token
    if plan.assumed:
        yield "class defaults taken for: " + ", ".join(
            f"{name} {value}" for name, value in plan.assumed.items()
        )
    yield (
        f"one request: {format_size(fixed)} at most that does not grow, and {slope:,.10g} B for"
        " every token"
    )


def layers(plan: Plan, *, every_layer: bool = False) -> Table:
    """What the layers remember, how long, and why."""
    made = _table("What each layer remembers", ["layers", "kind", "remembers", "decided by"])
    rows = [Alike(layers=(layer,)) for layer in plan.layers] if every_layer else alike(plan)
    for row in rows:
        made.add_row(row.indices, row.first.kind, row.words, escape(decided(row.first.decided_by)))
    made.caption = (
        "* not in the config: a class default, or follows from other fields"
        if any(not d.given for r in rows for d in r.first.decided_by)
        else None
    )
    made.caption_justify = "left"
    return made


def groups(plan: Plan) -> Table:
    """How streams with one law lie in the arena."""
    made = _table(
        "Groups: one table, one page size each",
        ["law", "streams"],
        ["layers", "block tokens", "page", "bucket", "pages"],
    )
    for group in plan.groups:
        pages = "grow" if group.pages_at_most is None else f"{group.pages_at_most:,} at most"
        made.add_row(
            group.law,
            ", ".join(group.streams),
            str(len(group.layers)),
            f"{group.block_tokens:,}",
            format_size(group.page_bytes),
            f"{group.bucket}: {format_size(group.bucket_bytes)}",
            pages,
        )
    return made


def lengths(plan: Plan) -> Table:
    """One request at several lengths, and how many of them fit."""
    right = [
        "needed at most",
        "grows",
        "bounded",
        "allocated",
        "over",
        "fit",
        "if nothing were rounded",
    ]
    made = _table("One request of so many tokens, and how many fit", [], ["tokens", *right])
    for at, fit in zip(plan.bytes_at.values(), plan.capacity, strict=True):
        made.add_row(
            f"{at.tokens:,}",
            *map(format_size, (at.ideal, at.growing, at.bounded, at.allocated)),
            f"{at.allocated / at.ideal - 1:.1%}",
            f"{fit.requests:,}",
            f"{fit.ideal:,.1f}",
            style="bold" if at.tokens == plan.context else None,
        )
    return made


def facts(plan: Plan) -> Table:
    """Everything that is one number."""
    made = _table("In numbers", ["what"], ["how much"])
    for row in numbers(plan):
        made.add_row(*row)
    return made


def waste(plan: Plan) -> Table:
    """Where the arena's bytes go."""
    made = _table(
        f"The arena with as many requests of {plan.context:,} tokens as fit",
        ["bytes for"],
        ["bytes", "part"],
    )
    for name, words in WASTE.items():
        value = getattr(plan.waste, name)
        made.add_row(words, format_size(value), f"{value / plan.waste.total:.2%}")
    made.add_section()
    made.add_row("all", format_size(plan.waste.total), "", style="bold")
    return made


def comparisons(plan: Plan) -> Iterator[RenderableType]:
    """The same model under other rules."""
    at = plan.bytes_at[plan.context]
    if plan.uniform is not None:
        uniform = plan.uniform
        made = _table(
            "Against every layer charged as full attention",
            [""],
            ["per token", "one request", "requests"],
        )
        made.add_row(
            "here",
            f"{plan.slope_bytes_per_token:,.10g} B",
            format_size(at.allocated),
            f"{plan.requests_that_fit:,}",
        )
        made.add_row(
            "uniform",
            f"{uniform.bytes_per_token:,} B",
            format_size(uniform.bytes),
            f"{uniform.requests:,.1f}",
        )
        made.add_row("factor", "", f"{uniform.bytes / at.allocated:.2f}", "")
        yield made
    if plan.vllm is not None:
        yield _vllm(plan, plan.vllm)


def _vllm(plan: Plan, vllm: VllmPlan) -> RenderableType:
    if vllm.reason:
        return f"\n[bold]Against vLLM's rules[/]: they do not apply: {escape(vllm.reason)}"
    title = (
        f"Against vLLM's rules (0.32): {vllm.num_blocks:,} blocks of"
        f" {format_size(vllm.block_bytes)}"
    )
    made = _table(
        title,
        ["groups"],
        ["caches in each", "block tokens", "page", "padding", "planned blocks", "held blocks"],
    )
    for group, times in Counter(vllm.groups).items():
        made.add_row(
            f"{times} x {group.sort}",
            str(group.layers),
            f"{group.block_tokens:,}",
            format_size(group.page_bytes),
            format_size(group.padded_bytes),
            f"{group.planned_blocks:,}",
            f"{group.held_blocks:,}",
        )
    here = plan.bytes_at[plan.context]
    below = (
        f"one request holds {format_size(vllm.held_bytes)} (here {format_size(here.allocated)}); it"
        f" plans {vllm.planned:.2f} requests and holds {vllm.resident:,} (here"
        f" {plan.requests_that_fit // plan.memory.replicas:,}); its prefixes hit by"
        f" {vllm.min_hit_tokens:,} tokens (here {plan.min_hit_tokens:,})"
    )
    return Lines(made, below)


def compare(plans: Sequence[Plan]) -> RenderableType:
    """Several models side by side, each at its own context; ratios are to the first."""
    first = plans[0]
    made = _table("Compared", ["what"], [plan.model for plan in plans])

    def row(what: str, value: Any) -> None:
        made.add_row(what, *(value(plan) for plan in plans))

    def growing(plan: Plan) -> int:
        return plan.bytes_at[plan.context].growing

    row("context", lambda plan: f"{plan.context:,}")
    row("layers", lambda plan: str(len(plan.layers)))
    row("with a cache", lambda plan: str(sum(bool(layer.streams) for layer in plan.layers)))
    row("bytes per token", lambda plan: f"{plan.slope_bytes_per_token:,.10g}")
    row("fixed per request", lambda plan: format_size(plan.fixed_bytes_per_request))
    row("growing part", lambda plan: f"{growing(plan) / 2**30:,.3f} GiB")
    row(
        "growing part, times the first",
        lambda plan: f"{growing(plan) / growing(first):.2f}" if growing(first) else "-",
    )
    row(
        "allocated for one request", lambda plan: format_size(plan.bytes_at[plan.context].allocated)
    )
    row("requests that fit", lambda plan: f"{plan.requests_that_fit:,}")
    row("longest context", lambda plan: f"{plan.max_context:,}")
    row("smallest hit", lambda plan: f"{plan.min_hit_tokens:,}")
    row("resume point", lambda plan: format_size(plan.resume_point_bytes))
    return Lines(made, *(f"{plan.model}: {'; '.join(_sorts(plan))}" for plan in plans))


def _sorts(plan: Plan) -> Iterator[str]:
    for each in alike(plan):
        yield f"{len(each.layers)} {each.name} ({escape(each.words.replace(chr(10), ' + '))})"
