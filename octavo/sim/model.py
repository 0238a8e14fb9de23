"""Models for the simulator: groups built from laws alone or read from a config, on arenas small
enough to be always in trouble.

Owns the zoo of law mixtures and how a seed picks sizes. Knows laws, groups and layouts; knows no
kinds, no requests and no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from octavo.base import ConfigError, ceil_div
from octavo.cache.layout import CPU, GPU, CacheLayout, GroupLayout, nests, solve_layout
from octavo.memory.layout import ArenaLayout
from octavo.spec.group import Group, Member, make_groups
from octavo.spec.hf import load_config, read_spec
from octavo.spec.law import Chunk, Everything, Law, SinkWindow, Snapshot, Tail, Window
from octavo.spec.stream import Field, Stream

UNIT_BYTES = 64
"""Granule of toy arenas: one cache line, so that toy pages of one token differ in size."""


@dataclass(frozen=True, kw_only=True)
class ToyGroup:
    """One group to be: a law, its block size in tokens, and the bytes of one entry."""

    law: Law
    block_tokens: int
    entry_bytes: int = 64


ZOO: tuple[tuple[str, tuple[Law, ...]], ...] = (
    ("everything", (Everything(),)),
    ("window", (Window(8),)),
    ("window-everything", (Window(8), Everything())),
    ("narrow-everything", (Window(3), Everything())),
    ("windows-everything", (Window(4), Window(13), Everything())),
    ("chunk-everything", (Chunk(6), Everything())),
    ("chunk", (Chunk(8),)),
    ("sinks", (SinkWindow(2, 6),)),
    ("sinks-everything", (SinkWindow(3, 5), Everything())),
    ("tail-everything", (Tail(4, 4), Everything())),
    ("snapshot", (Snapshot(),)),
    ("snapshot-everything", (Snapshot(), Everything())),
    ("snapshot-window", (Snapshot(), Window(7))),
    ("all-laws", (Everything(), Window(6), Chunk(5), SinkWindow(1, 4), Tail(4, 2), Snapshot())),
)
"""Names and laws of the toy models, for ``octavo sim --model``."""


def toy_names() -> tuple[str, ...]:
    """Names of all toy models."""
    return tuple(name for name, _ in ZOO)


def toy_layout(
    groups: Sequence[ToyGroup],
    *,
    hash_unit: int,
    slab_pages: int,
    num_slabs: int,
    max_model_len: int,
    slack_units: int = 0,
) -> CacheLayout:
    """Build a layout by hand.

    slab_pages: pages of the largest group in one slab; slack_units: units by which a slab is larger
        than that.
    """
    made = [_group(toy, index) for index, toy in enumerate(groups)]
    formats = [group.page_format(toy.block_tokens) for group, toy in zip(made, groups, strict=True)]
    units = [ceil_div(fmt.page_bytes, UNIT_BYTES) for fmt in formats]
    buckets = tuple(sorted(set(units), reverse=True))
    layouts = []
    for group, fmt, page_units in zip(made, formats, units, strict=True):
        fixed, turning = group.table_columns(fmt.block_tokens)
        blocks = ceil_div(max_model_len, fmt.block_tokens)
        if fixed is not None:
            fixed = min(fixed, blocks)
            turning = min(turning, max(1, blocks - fixed))
        bucket = buckets.index(page_units)
        layouts.append(
            GroupLayout(
                group=group,
                format=fmt,
                bucket=bucket,
                page_units=page_units,
                fixed=fixed,
                turning=turning,
            )
        )
    arena = ArenaLayout(
        unit_bytes=UNIT_BYTES,
        slab_units=slab_pages * max(units) + slack_units,
        num_slabs=num_slabs,
        page_units=buckets,
    )
    return CacheLayout(
        groups=tuple(layouts), arena=arena, hash_unit=hash_unit, max_model_len=max_model_len
    )


def _group(toy: ToyGroup, index: int) -> Group:
    stream = Stream(
        name="toy", law=toy.law, fields=(Field(name="x", shape=(toy.entry_bytes,), dtype="uint8"),)
    )
    return Group(law=toy.law, members=(Member(layer=index, mixer="toy", stream=stream),))


def draw_model(rng: Random, name: str | None = None) -> tuple[str, CacheLayout]:
    """A toy model, by name or any, or the model of a ``config.json``, with sizes drawn from
    ``rng``.

    name: of the zoo, or the path of a config or of its directory. Raises ConfigError for anything
    else, UnsupportedError for a model that octavo cannot run.
    """
    drawn = rng.choice(toy_names())
    name = drawn if name is None else name
    laws = dict(ZOO).get(name)
    if laws is not None:
        return name, _draw_toy(rng, laws)
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"model {name!r} is no toy model and no path of a config.json; toys:"
            f" {', '.join(toy_names())}"
        )
    return name, _draw_sizes(rng, make_groups(read_spec(load_config(path)), "bfloat16"))


def _draw_toy(rng: Random, laws: tuple[Law, ...]) -> CacheLayout:
    hash_unit = rng.choice((1, 2, 3, 4))
    blocks = [block for block in range(1, 9) if nests(block, hash_unit)]
    toys = [
        ToyGroup(
            law=law, block_tokens=rng.choice(blocks), entry_bytes=64 * rng.choice((1, 1, 2, 5))
        )
        for law in laws
    ]
    return toy_layout(
        toys,
        hash_unit=hash_unit,
        slab_pages=rng.choice((1, 1, 2, 3)),
        num_slabs=rng.choice((8, 12, 16, 24, 40, 80, 200)),
        max_model_len=rng.choice((24, 48, 96)),
        slack_units=rng.choice((0, 0, 1, 3)),
    )


def _draw_sizes(rng: Random, groups: Sequence[Group]) -> CacheLayout:
    """Real groups, cut by the real solver for an arena of a few long requests."""
    max_model_len = rng.choice((300, 700))
    request_bytes = sum(group.bytes_needed(max_model_len) for group in groups)
    return solve_layout(
        groups,
        arena_bytes=request_bytes * rng.choice((2, 3, 6)),
        profile=rng.choice((CPU, GPU)),
        hash_unit=16,
        max_model_len=max_model_len,
    )
