"""Cache reports as tables and as JSON.

Owns how they look. Knows reports only; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from octavo.cache.report import CacheReport
from octavo.config import format_size
from octavo.engine.outputs import RequestOutput
from octavo.plan.held import Held


def table(report: CacheReport) -> Table:
    """The report of one request, one line per group."""
    made = Table(
        title=f"What the cache held after {report.tokens:,} tokens",
        title_justify="left",
        title_style="bold",
    )
    for name in ("layers", "remember"):
        made.add_column(name)
    for name in ("blocks of tokens", "held", "one uniform cache"):
        made.add_column(name, justify="right")
    for group in report.groups:
        made.add_row(
            str(len(group.layers)),
            group.law,
            f"{group.blocks:,} × {group.block_tokens:,}",
            format_size(group.bytes),
            format_size(group.uniform_bytes),
        )
    made.add_section()
    made.add_row(
        "all", "", "", format_size(report.bytes), format_size(report.uniform_bytes), style="bold"
    )
    return made


def kinds_table(held: Sequence[Held]) -> Table:
    """What one request held, one line for streams that are alike; ``1:4`` is one entry for four
    tokens.
    """
    made = Table(
        title="By what layers remember",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    made.add_column("stream", no_wrap=True)
    for name in ("kind", "remembers"):
        made.add_column(name)
    for name in ("layers", "entries", "held", "share"):
        made.add_column(name, justify="right", no_wrap=True)
    for each in held:
        per = "" if each.stride == 1 else f" 1:{each.stride:,}"
        count = (str(len(each.layers)), f"{each.entries:,}") if each.layers else ("", "")
        made.add_row(
            f"{each.stream}{per}",
            "\n".join(each.kinds),
            each.law,
            *count,
            format_size(each.bytes),
            f"{each.share:.1%}",
        )
    return made


def notes(report: CacheReport, prompt_tokens: int) -> str:
    """What was spared, and the most that was held at once."""
    if report.bytes < report.uniform_bytes:
        saved = f"{1 - report.bytes / report.uniform_bytes:.0%} less than one uniform cache"
    else:
        saved = "no less than one uniform cache: too few tokens yet for anything to be let go"
    return (
        f"{saved}; at most {format_size(report.peak_bytes)} held at any step\n"
        f"{report.cached_tokens:,} of {prompt_tokens:,} prompt tokens came from the prefix cache"
    )


def as_json(output: RequestOutput, held: Sequence[Held] = ()) -> dict[str, Any]:
    """An output as plain JSON values, and what its cache held by kind of memory as
    ``cache_by_kind``.
    """
    return {**asdict(output), "cache_by_kind": [asdict(each) for each in held]}
