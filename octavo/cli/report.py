"""Cache reports as tables and as JSON.

Owns how they look. Knows reports only; imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from octavo.engine.outputs import RequestOutput
from octavo.engine.report import CacheReport

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes as people read them: ``16.9 MiB``."""
    for unit in UNITS[:-1]:
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} {UNITS[-1]}"


def layers(indices: tuple[int, ...]) -> str:
    """Layer numbers as ``15: 0-4 6-10 12-16``: the count and the runs, cut where they would not fit a line."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return f"{len(indices)}: " + " ".join(shown[:6] + ["…"] * (len(shown) > 6))


def table(report: CacheReport) -> Table:
    """The report of one request, one line per group."""
    made = Table(title=f"What the cache held for {report.tokens:,} tokens", title_justify="left", title_style="bold")
    made.add_column("remembers")
    made.add_column("layers")
    for name in ("block", "blocks", "held at most", "one uniform cache"):
        made.add_column(name, justify="right")
    for group in report.groups:
        made.add_row(
            group.law,
            layers(group.layers),
            f"{group.block_tokens} tokens",
            f"{group.peak_blocks:,}",
            size(group.peak_bytes),
            size(group.uniform_bytes),
        )
    made.add_section()
    made.add_row("all", "", "", "", size(report.peak_bytes), size(report.uniform_bytes), style="bold")
    return made


def notes(output: RequestOutput) -> str:
    """One line about what was spared."""
    report: CacheReport = output.cache_report
    share = 1 - report.peak_bytes / report.uniform_bytes
    prompt = len(output.prompt_token_ids)
    spared = f"prefix cache: {output.num_cached_tokens:,} of {prompt:,} prompt tokens"
    lost = f"; preempted {report.num_preemptions} times" if report.num_preemptions else ""
    return f"{share:.0%} less than one uniform cache; {spared}{lost}"


def as_json(output: RequestOutput) -> dict[str, Any]:
    """An output as plain JSON values."""
    return asdict(output)
