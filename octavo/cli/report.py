"""Cache reports as tables and as JSON.

Owns how they look. Knows reports only; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from octavo.cache.report import CacheReport
from octavo.config import format_size
from octavo.engine.outputs import RequestOutput
from octavo.plan.held import Held


def table(report: CacheReport) -> Table:
    """The report of one request, one line per group."""
    made = Table(title=f"What the cache held after {report.tokens:,} tokens", title_justify="left", title_style="bold")
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
    made.add_row("all", "", "", format_size(report.bytes), format_size(report.uniform_bytes), style="bold")
    return made


def kinds_table(held: Sequence[Held]) -> Table:
    """What one request held, one line for streams that are alike."""
    made = Table(title="By what layers remember", title_justify="left", title_style="bold")
    for name in ("stream", "kind", "how long", "dtype"):
        made.add_column(name)
    for name in ("layers", "entries of each", "held", "share"):
        made.add_column(name, justify="right")
    for each in held:
        per = "" if each.stride == 1 else f" of {each.stride:,} tokens"
        count = (str(len(each.layers)), f"{each.entries:,}") if each.layers else ("", "")
        made.add_row(
            f"{each.stream}{per}",
            ", ".join(each.kinds),
            each.law,
            ", ".join(each.dtypes),
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
    """An output as plain JSON values, and what its cache held by kind of memory as ``cache_by_kind``."""
    return {**asdict(output), "cache_by_kind": [asdict(each) for each in held]}
