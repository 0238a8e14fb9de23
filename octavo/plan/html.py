"""Plans as one page of HTML that needs nothing else: no script, no font, no picture from elsewhere.

Owns the page: layer map and stacked areas as inline SVG, and the tables; and what other pages of
this kind have in common with it: ``document``, ``table``, ``legend``. Knows plans only; all text is
escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import log
from typing import Final

from octavo.config import format_size
from octavo.plan.report import Plan
from octavo.plan.words import WASTE, Alike, alike, decided, devices, numbers

COLOURS: Final = (
    "#3b6ea8",
    "#d9822b",
    "#4b9b6a",
    "#a84b6e",
    "#7a5ea8",
    "#b59b2c",
    "#3f9aa3",
    "#8a6d5b",
    "#c0574f",
    "#6b7785",
)
"""Of kinds and streams, in order of appearance; readable on white and on black."""

NOTHING: Final = "#9aa0a6"
"""Colour of layers that keep nothing."""

STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: .9rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8884; text-align: left;
  vertical-align: top; white-space: pre-line; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.scroll { overflow-x: auto; }
.key i { display: inline-block; width: .9em; height: .9em; margin: 0 .35em 0 1em;
  vertical-align: -.1em; }
"""

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 320, 80, 30


def page(plans: Sequence[Plan]) -> str:
    """The page of some plans."""
    title = ", ".join(plan.model for plan in plans)
    return document(f"Cache plan: {title}", (part for plan in plans for part in _plan(plan)))


def document(title: str, parts: Iterable[str]) -> str:
    """A page of parts that are HTML already."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"</head>\n<body>\n{body}\n</body></html>\n"
    )


def _plan(plan: Plan) -> Iterator[str]:
    at = plan.bytes_at[plan.context]
    yield (
        f"<h1>{escape(plan.model)}</h1><p>{escape(devices(plan))}; {plan.profile} profile; dtypes: "
    )
    yield escape(", ".join(f"{what} {dtype}" for what, dtype in plan.dtypes.items())) + "</p>"
    yield (
        f"<p>One request of {plan.context:,} tokens takes <b>{format_size(at.allocated)}</b>;"
        f" <b>{plan.requests_that_fit:,}</b> fit. Every token adds"
        f" {plan.slope_bytes_per_token:,.10g} B; {format_size(plan.fixed_bytes_per_request)} at"
        f" most do not grow. The longest context for {plan.requests:,} at once is"
        f" <b>{plan.max_context:,}</b> tokens; a prefix hits from {plan.min_hit_tokens:,} tokens"
        " on.</p>"
    )
    yield f"<h2>Layers</h2>{_layer_map(plan)}"
    yield table(
        ("layers", "kind", "remembers", "decided by"),
        (),
        (
            (each.indices, each.name, each.words, decided(each.first.decided_by))
            for each in alike(plan)
        ),
    )
    yield f"<h2>Bytes by kind over context length</h2>{_areas(plan)}"
    yield from _tables(plan)


def _tables(plan: Plan) -> Iterator[str]:
    yield "<h2>In numbers</h2>"
    yield table(("what",), ("how much",), numbers(plan))
    yield "<h2>Lengths</h2>"
    yield table(
        (),
        (
            "tokens",
            "needed at most",
            "grows",
            "bounded",
            "allocated",
            "fit",
            "if nothing were rounded",
        ),
        (
            (
                f"{at.tokens:,}",
                *map(format_size, (at.ideal, at.growing, at.bounded, at.allocated)),
                f"{fit.requests:,}",
                f"{fit.ideal:,.1f}",
            )
            for at, fit in zip(plan.bytes_at.values(), plan.capacity, strict=True)
        ),
    )
    yield "<h2>Groups</h2>"
    yield table(
        ("law", "streams"),
        ("layers", "block tokens", "page", "bucket", "pages at most"),
        (
            (
                group.law,
                ", ".join(group.streams),
                str(len(group.layers)),
                f"{group.block_tokens:,}",
                format_size(group.page_bytes),
                format_size(group.bucket_bytes),
                "grow" if group.pages_at_most is None else f"{group.pages_at_most:,}",
            )
            for group in plan.groups
        ),
    )
    yield f"<h2>The arena, full of requests of {plan.context:,} tokens</h2>"
    parts = ((words, getattr(plan.waste, name)) for name, words in WASTE.items())
    total = plan.waste.total
    yield table(
        ("bytes for",),
        ("bytes", "part"),
        ((words, format_size(n), f"{n / total:.2%}") for words, n in parts),
    )


def table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of words, then columns of numbers."""
    classes = [""] * len(left) + [' class="n"'] * len(right)

    def line(tag: str, cells: Sequence[str]) -> str:
        return (
            "<tr>"
            + "".join(
                f"<{tag}{c}>{escape(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True)
            )
            + "</tr>"
        )

    body = "\n".join(line("td", row) for row in rows)
    return (
        "<div"
        f' class="scroll"><table><thead>{line("th", (*left, *right))}</thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def legend(names: dict[str, str]) -> str:
    """Names beside the colours that stand for them."""
    return (
        '<p class="key">'
        + "".join(f'<i style="background:{c}"></i>{escape(name)}' for name, c in names.items())
        + "</p>"
    )


def _layer_map(plan: Plan, *, per_row: int = 32, cell: int = 26) -> str:
    """One cell per layer, cut by the laws that it keeps streams under."""
    laws = dict.fromkeys(stream.law for layer in plan.layers for stream in layer.streams)
    colour = {law: COLOURS[index % len(COLOURS)] for index, law in enumerate(laws)}
    cells = []
    for layer in plan.layers:
        x, y = layer.index % per_row * cell, layer.index // per_row * cell
        own = list(dict.fromkeys(stream.law for stream in layer.streams)) or [""]
        words = f"layer {layer.index}: {layer.kind}; {Alike(layers=(layer,)).words}"
        strips = "".join(
            f'<rect x="{x}" y="{y + (cell - 4) * i / len(own):.1f}" width="{cell - 4}"'
            f' height="{(cell - 4) / len(own):.1f}" fill="{colour.get(law, NOTHING)}"/>'
            for i, law in enumerate(own)
        )
        cells.append(
            f'<g><title>{escape(words)}</title>{strips}<text x="{x + 3}" y="{y + 15}"'
            f' opacity=".8">{layer.index}</text></g>'
        )
    rows = (len(plan.layers) - 1) // per_row + 1
    key = {
        **colour,
        **(
            {"no cache of its own": NOTHING}
            if any(not layer.streams for layer in plan.layers)
            else {}
        ),
    }
    size = f'viewBox="0 0 {per_row * cell} {rows * cell}" width="{per_row * cell}"'
    return f'<svg {size} role="img" aria-label="layer map">{"".join(cells)}</svg>{legend(key)}'


def _areas(plan: Plan) -> str:
    """Stacked areas over a logarithmic axis of lengths."""
    lengths, names = plan.curve_lengths, list(plan.curves)
    top = max((sum(column) for column in zip(*plan.curves.values(), strict=True)), default=0) or 1
    span = log(lengths[-1] / lengths[0]) or 1.0

    def x(n: float) -> float:
        return LEFT + (WIDTH - LEFT) * log(n / lengths[0]) / span

    def y(value: float) -> float:
        return HEIGHT * (1 - value / top)

    shapes, below = [], [0] * len(lengths)
    for index, name in enumerate(names):
        above = [low + more for low, more in zip(below, plan.curves[name], strict=True)]
        edge = [f"{x(n):.1f},{y(v):.1f}" for n, v in zip(lengths, above, strict=True)]
        back = [
            f"{x(n):.1f},{y(v):.1f}"
            for n, v in zip(reversed(lengths), reversed(below), strict=True)
        ]
        label = f"{name}: {format_size(plan.curves[name][-1])} after {lengths[-1]:,} tokens"
        colour = COLOURS[index % len(COLOURS)]
        shapes.append(
            f'<polygon points="{" ".join(edge + back)}"'
            f' fill="{colour}"><title>{escape(label)}</title></polygon>'
        )
        below = above
    shapes += [
        f'<path d="M{LEFT} {y(top * part):.1f} H{WIDTH}" stroke="currentColor" opacity=".15"/><text'
        f' x="{LEFT - 6}" y="{max(12, y(top * part)):.1f}"'
        f' text-anchor="end">{format_size(top * part)}</text>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    ]
    ticks = [n for n in (2**power for power in range(8, 40, 2)) if lengths[0] <= n <= lengths[-1]]
    shapes += [
        f'<text x="{x(n):.1f}" y="{HEIGHT + 20}" text-anchor="middle">{n:,}</text>' for n in ticks
    ]
    size = f'viewBox="0 0 {WIDTH + 40} {HEIGHT + BOTTOM}" width="{WIDTH + 40}"'
    key = legend({name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)})
    return (
        f'<svg {size} role="img" aria-label="bytes by kind over context'
        f' length">{"".join(shapes)}</svg>{key}'
    )
