"""Steps over random pasts in random pages, for tests of ops: odd tables and rings, ragged lengths,
fresh entries and stored ones, fewer queries than entries, and NaN wherever nothing is to be read.

Owns the making of them. Knows streams and laws; knows no plan and no kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from octavo.ops.paged import CacheView, FieldView, StreamView
from octavo.ops.reads import Parts, Reads, positions_of
from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH
from octavo.spec.law import Law
from octavo.spec.stream import DTYPE_BYTES, Stream


def make_parts(
    seed: int,
    *,
    requests: int = 4,
    longest: int = 60,
    chunk: int = 20,
    decode: float = 0.5,
    fewer: bool = False,
) -> Parts:
    """longest: tokens of a past at most. chunk: of a part. decode: share of parts of one token.
    fewer: some tokens have no query, and some requests none at all.
    """
    rng = np.random.default_rng(seed)
    start = rng.integers(0, longest + 1, requests)
    long = rng.integers(1, chunk + 1, requests)
    lengths = np.where(rng.random(requests) < decode, 1, long)
    entry_start_loc = np.concatenate(([0], np.cumsum(lengths)))
    if not fewer:
        return Parts.of(start, entry_start_loc, "cpu")
    asked = rng.random(entry_start_loc[-1]) < 0.5
    counts = np.add.reduceat(asked.astype(np.int64), entry_start_loc[:-1])
    return Parts(
        start=start.astype(np.int64),
        entry_start_loc=entry_start_loc,
        query_start_loc=np.concatenate(([0], np.cumsum(counts))),
        query_positions=positions_of(start, entry_start_loc)[asked],
        device=torch.device("cpu"),
    )


def make_reads(
    seed: int, parts: Parts, law: Law, *, block: int = 4, ring: bool = False, fresh: float = 0.0
) -> Reads:
    """ring: a law that lets go has few columns. fresh: share of requests whose entries are stored
    behind the reads, some of them nowhere.
    """
    rng = np.random.default_rng(seed)
    count, longest = parts.num_requests, int(np.diff(parts.entry_start_loc).max(initial=1))
    fixed, turning = None, 0
    columns = int(parts.stop.max(initial=0)) // block + 2
    if ring and law.prefix is not None:
        fixed = -(-law.prefix // block)
        # Wide enough for what a step that writes first may hold at once.
        turning = (law.span + longest) // block + 2
        columns = fixed + turning
    drawn = rng.permutation(count * columns * 2)[: count * columns]
    table = drawn.reshape(count, columns).astype(np.int32)
    rows = rng.permutation(count).astype(np.int64)
    late = rng.random(count) < fresh
    positions = positions_of(parts.start, parts.entry_start_loc)
    owner = np.repeat(np.arange(count), np.diff(parts.entry_start_loc))
    blocks, places = np.divmod(positions, block)
    if fixed is not None:
        blocks = np.where(blocks < fixed, blocks, fixed + (blocks - fixed) % turning)
    lost = late[owner] & (rng.random(len(owner)) < 0.3)
    return Reads(
        parts=parts,
        law=law,
        table=table,
        rows=rows,
        fixed=fixed,
        turning=turning,
        block_tokens=block,
        pages=np.where(lost, -1, table[rows[owner], blocks]).astype(np.int32),
        page_rows=places.astype(np.int32),
        fresh=late,
    )


def over_nothing(stream: Stream, starts: int, entries: int) -> StreamView:
    """A stream in ``starts`` pages of ``entries`` entries, all bits set: NaN in floats. Fields lie
    between others, as in an arena.
    """
    fields = {}
    for field in stream.fields:
        headed = field.shard == "heads"
        heads, *rest = field.shape if headed else (1, *field.shape)
        size = heads * entries * prod(rest)
        bytes_ = torch.full((2 * starts * size * DTYPE_BYTES[field.dtype],), 255, dtype=torch.uint8)
        typed = bytes_.view(getattr(torch, field.dtype))
        data = typed.view(starts, 2, heads, entries, *rest)[:, 1]
        fields[field.name] = FieldView(data, headed=headed)
    return StreamView(stream, fields)


class Numbers:
    """Random parts of entries. widths: shape of each part."""

    def __init__(
        self, seed: int, widths: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.widths, self.dtype = widths, dtype

    def __call__(self, count: int) -> dict[str, Tensor]:
        return {
            part: torch.randn(count, *shape, generator=self.generator).to(self.dtype)
            for part, shape in self.widths.items()
        }


def make_view(
    seed: int,
    reads: Reads,
    stream: Stream,
    widths: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.float64,
    ops: Ops = TORCH,
    begun: bool = True,
    fresh_only: bool = False,
) -> CacheView:
    """A stream's view in a step whose past is random. begun: the step's own entries are made.
    fresh_only: they are NaN again in ``fresh`` where they are in pages, too.
    """
    over = over_nothing(
        stream, int(reads.table.max(initial=0)) + 1, reads.block_tokens // stream.stride
    )
    view, numbers = CacheView(over=over, reads=reads, ops=ops), Numbers(seed, widths, dtype)
    for request, start in enumerate(reads.parts.start.tolist()):
        tokens = [p for a, b in stream.needs(start) for p in range(a, b) if p % stream.stride == 0]
        where = np.array(tokens, dtype=np.int64)
        pages, rows = reads.find(np.full(len(where), request), where)
        stored = over.entry.encode(numbers(len(tokens)))
        for name, made in stored.items():
            field = over.fields[name]
            kept = made if field.headed else made[:, None]
            places = (
                torch.from_numpy(pages.astype(np.int64)),
                torch.from_numpy(rows // stream.stride),
            )
            everything = torch.arange(len(tokens))
            TORCH.store([field.data], *places, [kept.to(field.data.dtype)], everything)
    if begun and stream.stride > 1:
        view.collect(**numbers(len(reads.closed(stream.stride).numbers)))
    elif begun:
        view.begin(**numbers(reads.parts.num_entries))
        for made in view.fresh.values() if fresh_only else ():
            for request in np.flatnonzero(~reads.fresh).tolist():
                low, high = reads.parts.entry_start_loc[request : request + 2].tolist()
                made[low:high].view(torch.uint8).fill_(255)
    return view
