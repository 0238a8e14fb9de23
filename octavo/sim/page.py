"""What a cache made of a trace, as one page of HTML that needs nothing else, in the style of plans.

Owns the page: the curve of hits over memory, where the rest went, and tables. Knows reports only;
all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log
from types import MappingProxyType

from octavo.config import format_size
from octavo.plan.html import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    NOTHING,
    WIDTH,
    document,
    legend,
    table,
)
from octavo.sim.traffic import TrafficReport

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "none": "everything that may be reused was",
        "no_checkpoint": "the tokens were there, and layers that let go could not resume so far",
        "evicted": "evicted, and its ghost is there",
        "forgotten": "evicted so long ago that its ghost is gone, or not computed yet",
        "never_cached": "nobody sent it before",
        "off": "prefix caching was off",
    }
)
"""What the causes of misses mean."""


@dataclass(frozen=True, kw_only=True)
class Title:
    """What was sent, in words: of the model's config, of the trace, and how it was driven."""

    model: str
    trace: str
    driven: str


def page(title: Title, reports: Sequence[TrafficReport]) -> str:
    """The whole page. Reports come by policy and memory, in any order."""
    return document(f"Cache hits: {title.model}", _parts(title, reports))


def by_policy(reports: Sequence[TrafficReport]) -> dict[str, list[TrafficReport]]:
    """Reports of every policy, by growing memory."""
    return {
        policy: sorted(
            (each for each in reports if each.eviction == policy), key=lambda each: each.memory
        )
        for policy in dict.fromkeys(report.eviction for report in reports)
    }


def _parts(title: Title, reports: Sequence[TrafficReport]) -> Iterator[str]:
    first, curves = reports[0], by_policy(reports)
    yield (
        f"<h1>{escape(title.model)}</h1><p>{escape(title.trace)}; {escape(title.driven)}.</p><p>"
        f"{first.requests:,} requests with {first.prompt_tokens:,} prompt tokens; an unlimited"
        f" cache would have spared <b>{first.possible_rate:.1%}</b> of them.</p>"
    )
    yield f"<h2>Prompt tokens from the cache, over its memory</h2>{_curve(curves)}"
    yield "<h2>Where the others went</h2><p>Of all prompt tokens, by policy and memory. What"
    yield " nobody sent before is left out.</p>"
    for policy, found in curves.items():
        yield f"<h3>{escape(policy)}</h3>{_bars(found)}"
    yield "<h2>In numbers</h2>"
    yield from _tables(reports)


def _tables(reports: Sequence[TrafficReport]) -> Iterator[str]:
    yield table(
        ("eviction",),
        (
            "memory",
            "hits",
            "tokens",
            "evicted tokens",
            "preemptions",
            "computed again",
            "held at most",
            "used at most",
            "steps",
            "µs a step",
            "first token, p50",
            "p95",
        ),
        (
            (
                each.eviction,
                format_size(each.memory),
                f"{each.hit_rate:.2%}",
                f"{each.hit_tokens:,}",
                f"{each.evictions * each.hash_unit:,}",
                f"{each.preemptions:,}",
                f"{each.recomputed_tokens:,}",
                f"{each.peak_held / each.arena:.1%}",
                f"{each.peak_used / each.arena:.1%}",
                f"{each.steps:,}",
                f"{each.step_microseconds:,.0f}",
                f"{each.waits.p50:.2f} s",
                f"{each.waits.p95:.2f} s",
            )
            for each in reports
        ),
    )
    yield "<h2>Misses</h2>"
    yield table(
        ("eviction", "memory", "cause", "meaning"),
        ("requests", "tokens missed"),
        (
            (
                each.eviction,
                format_size(each.memory),
                cause,
                CAUSES[cause],
                f"{miss.requests:,}",
                f"{miss.tokens:,}",
            )
            for each in reports
            for cause, miss in each.misses.items()
        ),
    )
    if any(each.limited for each in reports):
        yield "<h2>Tokens that were there, and could not be resumed at because of</h2>"
        yield table(
            ("eviction", "memory", "group"),
            ("tokens",),
            (
                (each.eviction, format_size(each.memory), law, f"{tokens:,}")
                for each in reports
                for law, tokens in each.limited.items()
            ),
        )


def _curve(curves: Mapping[str, Sequence[TrafficReport]]) -> str:
    """Hits over memory, one line for every policy, and the most that is possible."""
    reports = [each for found in curves.values() for each in found]
    least, most = min(each.memory for each in reports), max(each.memory for each in reports)
    span = log(most / least) or 1.0
    top = max(max(each.hit_rate, each.possible_rate) for each in reports) or 1.0

    def x(memory: int) -> float:
        # Half the padding on either side, and a single size in the middle.
        place = log(memory / least) / span if most > least else 0.5
        return LEFT + 30 + (WIDTH - LEFT - 60) * place

    def y(rate: float) -> float:
        return 10 + (HEIGHT - 10) * (1 - rate / top)

    shapes = [
        f'<path d="M{LEFT} {y(top * part):.1f} H{WIDTH}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{LEFT - 6}" y="{y(top * part) + 4:.1f}" text-anchor="end">'
        f"{top * part:.1%}</text>"
        for part in (0, 0.25, 0.5, 0.75, 1)
    ]
    shapes += [
        f'<text x="{x(memory):.1f}" y="{HEIGHT + 20}" text-anchor="middle">{format_size(memory)}'
        "</text>"
        for memory in sorted({each.memory for each in reports})
    ]
    ceiling = y(reports[0].possible_rate)
    shapes.append(
        f'<path d="M{LEFT} {ceiling:.1f} H{WIDTH}" stroke="{NOTHING}" stroke-dasharray="6 4"/>'
    )
    colours = dict(zip(curves, COLOURS, strict=False))
    for policy, found in curves.items():
        points = [(x(each.memory), y(each.hit_rate), each) for each in found]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
        colour = colours[policy]
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"><title>'
            f"{escape(policy)}, {format_size(each.memory)}: {each.hit_rate:.2%}</title></circle>"
            for px, py, each in points
        ]
    size = f'viewBox="0 0 {WIDTH + 40} {HEIGHT + BOTTOM}" width="{WIDTH + 40}"'
    return (
        f'<svg {size} role="img" aria-label="hits over memory">{"".join(shapes)}</svg>'
        f"{legend({**colours, 'unlimited memory': NOTHING})}"
    )


def _bars(reports: Sequence[TrafficReport], *, height: int = 26) -> str:
    """One bar for every size: hits, and misses by cause, as parts of all prompt tokens."""
    causes = [cause for cause in CAUSES if any(_lost(each, cause) for each in reports)]
    colours = dict(zip(("hits", *causes), COLOURS, strict=False))
    top = max(each.hit_rate + sum(_lost(each, cause) for cause in causes) for each in reports)
    shapes = []
    for row, each in enumerate(reports):
        x, y = float(LEFT), row * height
        shapes.append(
            f'<text x="{LEFT - 6}" y="{y + 16}" text-anchor="end">{format_size(each.memory)}</text>'
        )
        for name, colour in colours.items():
            part = each.hit_rate if name == "hits" else _lost(each, name)
            width = part / (top or 1.0) * (WIDTH - LEFT)
            label = f"{format_size(each.memory)}, {name}: {part:.2%}"
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height - 6}"'
                f' fill="{colour}"><title>{escape(label)}</title></rect>'
            )
            x += width
    size = f'viewBox="0 0 {WIDTH + 40} {len(reports) * height}" width="{WIDTH + 40}"'
    return (
        f'<svg {size} role="img" aria-label="hits and misses by cause">{"".join(shapes)}</svg>'
        f"{legend(colours)}"
    )


def _lost(report: TrafficReport, cause: str) -> float:
    """Part of all prompt tokens that was missed for one cause."""
    miss = report.misses.get(cause)
    return 0.0 if miss is None else miss.tokens / max(1, report.prompt_tokens)
