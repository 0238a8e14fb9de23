"""The page pool: which pages of the arena are free, held, cached or in flight.

Owns ``PagePool``. Knows bytes and pages only: no tokens, no groups, no kinds, no tables, no
tensors. It never decides what to
evict and never copies a byte: callers reclaim cached pages, and carry out the moves that
``compact`` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.base import ceil_div
from octavo.memory.layout import ArenaLayout
from octavo.memory.page import Counts, Moves, Pages, PageState, PoolSnapshot
from octavo.memory.remap import Remap

Ids = npt.NDArray[np.int64]

_NO_ROOM = np.iinfo(np.int32).max
_NO_BUCKET = -1
# Plain integers: numpy is several times slower with enum members.
_FREE, _HELD, _CACHED, _LIMBO = (int(state) for state in PageState)
_STATES = len(PageState)


class PagePool:
    """Slab allocator over one arena.

    A page *is* its unit offset (int32). The arena is cut into equal slabs. A slab is either on the
    common free list or belongs to one page-size bucket and holds ``pages_per_slab`` pages of it; it
    returns to the free list the moment its last page is freed, so every byte can serve every
    bucket, and no page size is decided for good.

    States of a page::

        free   --allocate-->  held                     one reference
        held   --retain/release-->  held               while references > 0
        held   --release, naming a step-->  limbo      steps in flight have every reference
        held | limbo --last reference gone-->  cached  the prefix index uses it (keep), else free
        cached | limbo --retain-->  held               a prefix hit
        cached --trade-->  held                        its only user's use becomes a reference
        cached --drop-->  free                         evicted

    A page leaves limbo with the receipts of its steps. Limbo is not written down: a page is in it
    while steps have taken over as many references as there are.

    Allocation takes from the fullest slab that has a free page (lowest address among equals), and a
    new slab only when the bucket has no free page: nearly empty slabs are left to drain and become
    free by themselves, which is what keeps fragmentation low without moving anything. What
    fragmentation remains ``compact`` undoes, one slab at a time. Because it can always do so,
    ``fits`` may count pages instead of slabs and is exact.

    What a step in flight may still touch is no victim, whether or not the index uses it too: the
    step has taken the reference over. Such pages may move, since copies run in order behind the
    steps that are in flight.

    Pinned pages never move, and must keep a reference or a use while pinned: whoever pins also
    retains.

    Bookkeeping is arithmetic: page -> (slab, index in slab) -> row in numpy arrays of references,
    uses, pins and states. All operations are vectorised; arrays may hold pages of several buckets.
    A call that raises has changed nothing.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        slabs, buckets = layout.num_slabs, len(layout.page_units)
        self._per_slab = [layout.pages_per_slab(bucket) for bucket in range(buckets)]
        self._width = max(self._per_slab)
        self._states = np.zeros((slabs, self._width), np.uint8)
        self._flat_states = self._states.reshape(-1)
        self._references = np.zeros(slabs * self._width, np.int32)
        self._uses = np.zeros(slabs * self._width, np.int32)
        self._pins = np.zeros(slabs * self._width, np.int32)
        self._pinned: Ids = np.zeros(0, np.int64)
        self._in_flight = np.zeros(slabs * self._width, np.int32)
        self._limbo: list[tuple[int, Ids]] = []
        self._counts = np.zeros((buckets, _STATES), np.int64)
        self._slab_bucket = np.full(slabs, _NO_BUCKET, np.int32)
        self._slab_pages = np.zeros(slabs, np.int64)
        self._slab_page_units = np.ones(slabs, np.int64)
        self._used = np.zeros(slabs, np.int64)
        # Free pages by bucket and slab where a slab is partly used, else _NO_ROOM: the fullest slab
        # is the first minimum.
        self._room = np.full((buckets, slabs), _NO_ROOM, np.int32)
        self._free_slabs = np.arange(slabs - 1, -1, -1, dtype=np.int64)
        self._num_free_slabs = slabs

    # -- questions

    @property
    def free_slabs(self) -> int:
        """Slabs that no bucket has."""
        return self._num_free_slabs

    def counts(self, bucket: int) -> Counts:
        """Pages of a bucket by state. O(pages that steps in flight have taken over)."""
        free, held, cached, _ = self._counts[bucket].tolist()
        ids = self._in_limbo()
        limbo = int(np.count_nonzero(self._slab_bucket[ids // self._width] == bucket))
        return Counts(free=free, cached=cached, held=held - limbo, limbo=limbo)

    @property
    def waiting(self) -> bool:
        """Are there pages in limbo?"""
        return bool(len(self._in_limbo()))

    def _in_limbo(self) -> Ids:
        """Rows of pages all of whose references steps have taken over."""
        if not self._limbo:
            return np.zeros(0, np.int64)
        ids = np.unique(np.concatenate([rows for _, rows in self._limbo]))
        return ids[self._references[ids] == self._in_flight[ids]]

    def ready(self, wanted: Sequence[int]) -> bool:
        """Whether ``allocate`` can serve ``wanted[bucket]`` pages of every bucket now, without
        reclaim or compaction.
        """
        free = self._counts[:, _FREE].tolist()
        slabs = 0
        for want, have, per_slab in zip(wanted, free, self._per_slab, strict=True):
            slabs += ceil_div(max(0, want - have), per_slab)
        return slabs <= self._num_free_slabs

    def fits(self, wanted: Sequence[int]) -> bool:
        """Whether ``wanted[bucket]`` more pages fit after all reclaim and compaction: exact
        admission.
        """
        return self.shortfall(wanted) == 0

    def shortfall(self, wanted: Sequence[int]) -> int:
        """Slabs missing for ``wanted[bucket]`` more pages of every bucket; 0 where they fit.

        A bucket needs ``max(slabs with a pinned page, ceil((held + limbo + wanted) / pages per
        slab))`` slabs: cached pages can be reclaimed, all others but pinned ones can be moved
        together. A pinned cached page counts as held.
        """
        # Pages in limbo have references, and are counted as held here.
        held = self._counts[:, _HELD].tolist()
        pinned_cached, pinned_slabs = self._pinned_by_bucket()
        slabs = 0
        for bucket, (want, per_slab) in enumerate(zip(wanted, self._per_slab, strict=True)):
            stay = held[bucket] + pinned_cached[bucket]
            slabs += max(pinned_slabs[bucket], ceil_div(stay + want, per_slab))
        return max(0, slabs - self.layout.num_slabs)

    def gap(self, wanted: Sequence[int]) -> int:
        """Fewest cached pages that must go before compaction can make ``wanted[bucket]`` more pages
        of every bucket ready; 0 where it can now.

        As ``shortfall`` counts, but with everything cached staying. To give up the first slab a
        bucket must lose what stands over in its last one, and a slab's pages for every further one.
        """
        counts, slabs, first, every = self._counts.tolist(), 0, [], []
        _, pinned_slabs = self._pinned_by_bucket()
        for bucket, (want, per_slab) in enumerate(zip(wanted, self._per_slab, strict=True)):
            stay = counts[bucket][_HELD] + counts[bucket][_CACHED] + want
            slabs += max(pinned_slabs[bucket], ceil_div(stay, per_slab))
            if counts[bucket][_CACHED]:
                first.append((stay - 1) % per_slab + 1)
                every.append(per_slab)
        missing = slabs - self.layout.num_slabs
        if missing <= 0:
            return 0
        return min(first, default=1) + (missing - 1) * min(every, default=1)

    def references(self, pages: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Request references of every page; 0 for what is not a page at present."""
        return self._read(self._references, pages)

    def uses(self, pages: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Uses by the prefix index of every page; 0 for what is not a page at present."""
        return self._read(self._uses, pages)

    def exclusive(self, pages: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Where a page has one reference, no use, no pin and no step's: its holder may overwrite or
        recycle it.
        """
        ids, known = self._locate(pages)
        ids = ids * known
        others = self._uses[ids] + self._pins[ids] + self._in_flight[ids]
        return np.asarray(known & (self._references[ids] == 1) & (others == 0), np.bool_)

    def idle(self, pages: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Where a page is cached and not pinned: nobody refers to it, and it could go."""
        ids, known = self._locate(pages)
        ids = ids * known
        idle = (self._flat_states[ids] == _CACHED) & (self._pins[ids] == 0)
        return np.asarray(known & idle, np.bool_)

    def in_flight(self, pages: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """References of every page that steps have taken over."""
        return self._read(self._in_flight, pages)

    def snapshot(self) -> PoolSnapshot:
        """What every slab and page is."""
        bucket, states = self._slab_bucket.view(), self._states.copy()
        states.reshape(-1)[self._in_limbo()] = _LIMBO
        bucket.flags.writeable = states.flags.writeable = False
        return PoolSnapshot(slab_bucket=bucket, states=states)

    # -- operations

    def allocate(self, bucket: int, count: int) -> Pages:
        """``count`` pages of a bucket, int32, one reference each. AssertionError unless ``ready``
        holds.
        """
        per_slab = self._per_slab[bucket]
        if count < 0 or count > int(self._counts[bucket, _FREE]) + self._num_free_slabs * per_slab:
            raise AssertionError(f"allocate({bucket}, {count}) without asking ready()")
        if not count:
            return np.zeros(0, np.int32)
        if (pages := self._allocate_in_one(bucket, count)) is not None:
            return pages
        ids, slabs = self._pick(bucket, count)
        self._references[ids] = 1
        self._flat_states[ids] = _HELD
        self._counts[bucket, _HELD] += count
        self._occupy(bucket, ids, slabs)
        return self._pages(bucket, ids)

    def retain(self, pages: npt.ArrayLike) -> None:
        """One more request reference per entry of ``pages``; cached pages become held."""
        if not np.size(pages):
            return
        ids, times = _tally(self._live(pages))
        self._references[ids] += times
        self._transition(ids, _HELD)

    def release(self, pages: npt.ArrayLike, step: int | None = None) -> None:
        """One reference fewer per entry; where a step is named, it takes the references over until
        ``retire``.

        AssertionError, and no change, where a page is not held often enough, is unknown, or is
        pinned and would go.
        """
        if not np.size(pages):
            return
        rows = self._live(pages)
        if step is not None:
            self._take_over(rows, step)
            return
        ids, times = _tally(rows)
        held = self._references[ids] - self._in_flight[ids]
        self._demand(held >= times, ids, "released more often than held")
        self._settle(ids, self._references[ids] - times, self._uses[ids])

    def _take_over(self, rows: Ids, step: int) -> None:
        """One reference per entry is the step's now."""
        np.add.at(self._in_flight, rows, 1)
        fair = self._in_flight[rows] <= self._references[rows]
        if not fair.all():
            np.subtract.at(self._in_flight, rows, 1)
            self._demand(fair, rows, "released more often than held")
        self._limbo.append((step, rows))

    def trade(self, kept: npt.ArrayLike, held: npt.ArrayLike, step: int) -> npt.NDArray[np.bool_]:
        """Where ``kept[i]`` is cached and the caller's use its only one, that use becomes a
        reference; and ``held[i]``, of which the caller has a reference, goes the other way: it is
        used, and ``step`` takes the reference over. Bool: where that was done.
        """
        ids = self._live(np.concatenate([kept, held])).reshape(2, -1)
        mine = (self._references[ids[0]] == 0) & (self._uses[ids[0]] + self._pins[ids[0]] == 1)
        into, out = ids[0][mine], ids[1][mine]
        self._take_over(out, step)
        self._uses[out] += 1
        self._references[into], self._uses[into] = 1, 0
        self._transition(into, _HELD)
        return np.asarray(mine, np.bool_)

    def keep(self, pages: npt.ArrayLike) -> None:
        """One more use by the prefix index per entry of ``pages``; what is held, cached or in limbo
        stays so.
        """
        if not np.size(pages):
            return
        ids, times = _tally(self._live(pages))
        self._uses[ids] += times

    def drop(self, pages: npt.ArrayLike) -> None:
        """One use by the prefix index fewer per entry; a page without use and reference is free."""
        if not np.size(pages):
            return
        ids, times = _tally(self._live(pages))
        left = self._uses[ids] - times
        self._demand(left >= 0, ids, "dropped more often than kept")
        self._settle(ids, self._references[ids], left)

    def pin(self, pages: npt.ArrayLike) -> None:
        """Forbid that these held or cached pages move. Counts; every pin wants an ``unpin``."""
        ids, times = _tally(self._live(pages))
        self._pins[ids] += times
        self._pinned = np.union1d(self._pinned, ids)

    def unpin(self, pages: npt.ArrayLike) -> None:
        """Undo one ``pin`` per entry."""
        ids, times = _tally(self._live(pages))
        left = self._pins[ids] - times
        self._demand(left >= 0, ids, "unpinned more often than pinned")
        self._pins[ids] = left
        self._pinned = self._pinned[self._pins[self._pinned] > 0]

    def retire(self, step: int) -> None:
        """Give up the references that ``step`` and earlier steps have taken over: their receipts
        have arrived.
        """
        done = [rows for tag, rows in self._limbo if tag <= step]
        if done:
            self._limbo = [(tag, rows) for tag, rows in self._limbo if tag > step]
            ids, times = _tally(np.concatenate(done))
            self._in_flight[ids] -= times
            assert (self._in_flight[ids] >= 0).all(), "a step gives up what it has taken over"
            self._settle(ids, self._references[ids] - times, self._uses[ids])

    def compact(self) -> Moves | None:
        """Empty one slab by moving its live pages into free pages of its bucket's fullest other
        slabs.

        Takes the bucket in which that moves the fewest units; None where no slab can be emptied.
        Counts move along, and the emptied slab is on the free list at once. The caller must rewrite
        every table and index entry from source to target and record the copies in the step plan.
        Copies run in plan order and before the step's own writes, which is why the
        sources need no limbo: the slab may be handed out again right away, and even be the target
        of a later copy.
        """
        best: tuple[int, int, int] | None = None
        for bucket in range(len(self._per_slab)):
            slab = self._emptiest_movable(bucket)
            if slab is not None:
                cost = int(self._used[slab]) * self.layout.page_units[bucket]
                best = min(best, (cost, bucket, slab)) if best else (cost, bucket, slab)
        return None if best is None else self._empty_slab(best[1], best[2])

    # -- addresses

    def _pages(self, bucket: int, ids: Ids) -> Pages:
        units = self.layout.page_units[bucket]
        gap = self.layout.slab_units - self._width * units
        return (ids * units + ids // self._width * gap).astype(np.int32)

    def _locate(self, pages: npt.ArrayLike) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Row of every page in the bookkeeping, and whether it is the address of a page at
        present.
        """
        offsets = np.asarray(pages, dtype=np.int64).reshape(-1)
        slab = offsets // self.layout.slab_units
        # Unsigned, what is negative is too large.
        if np.maximum.reduce(slab.view(np.uint64), initial=0) >= self.layout.num_slabs:
            raise AssertionError(
                "no page of this arena:"
                f" {offsets[(slab < 0) | (slab >= self.layout.num_slabs)][:8]}"
            )
        inside, units = offsets - slab * self.layout.slab_units, self._slab_page_units[slab]
        index = inside // units
        return slab * self._width + index, (index * units == inside) & (
            index < self._slab_pages[slab]
        )

    def _live(self, pages: npt.ArrayLike) -> Ids:
        """Rows of pages that are not free. AssertionError where one is."""
        ids, known = self._locate(pages)
        live = known & (self._flat_states[ids * known] != _FREE)
        if np.count_nonzero(live) < len(live):
            raise AssertionError(f"no pages at present: {np.asarray(pages).reshape(-1)[~live][:8]}")
        return ids

    def _read(self, values: npt.NDArray[np.int32], pages: npt.ArrayLike) -> npt.NDArray[np.int32]:
        ids, known = self._locate(pages)
        return np.asarray(np.where(known, values[ids * known], 0), np.int32)

    def _demand(self, good: npt.NDArray[np.bool_], ids: Ids, complaint: str) -> None:
        if np.count_nonzero(good) < len(good):
            where = [(int(i) // self._width, int(i) % self._width) for i in ids[~good][:8]]
            raise AssertionError(f"pages (slab, index) {where} {complaint}")

    # -- transitions

    def _settle(self, ids: Ids, references: Any, uses: Any) -> None:
        """Store new counts of live pages (ids ascending, unique) and the states that follow from
        them.
        """
        gone = (references | uses) == 0
        leaves = np.count_nonzero(gone) > 0
        if leaves and len(self._pinned):
            self._demand(
                ~gone | (self._pins[ids] == 0),
                ids,
                "pinned, and would lose their last reference and use",
            )
        self._references[ids] = references
        self._uses[ids] = uses
        after = np.where(references > 0, _HELD, _CACHED)
        after[gone] = _FREE
        self._transition(ids, after)
        if leaves:
            self._vacate(ids[gone])

    def _transition(self, ids: Ids, after: Any) -> None:
        """Enter states (of every page, or one for all) and count them. The bucket of their slabs
        must be there.
        """
        before = self._flat_states[ids]
        if not np.count_nonzero(before != after):
            return
        self._flat_states[ids] = after
        row, size = self._slab_bucket[ids // self._width] * _STATES, self._counts.size
        delta = np.bincount(row + after, minlength=size) - np.bincount(row + before, minlength=size)
        self._counts += delta.reshape(self._counts.shape)

    def _vacate(self, ids: Ids) -> None:
        """Account for pages (ascending) that have just become free; slabs without a used page leave
        their bucket.
        """
        slabs, freed = _tally(ids // self._width)
        self._used[slabs] -= freed
        self._refresh_room(slabs)
        empty = slabs[self._used[slabs] == 0]
        if len(empty):
            np.subtract.at(
                self._counts[:, _FREE], self._slab_bucket[empty], self._slab_pages[empty]
            )
            self._slab_bucket[empty] = _NO_BUCKET
            self._slab_pages[empty] = 0
            self._slab_page_units[empty] = 1
            self._free_slabs[self._num_free_slabs : self._num_free_slabs + len(empty)] = empty
            self._num_free_slabs += len(empty)

    def _refresh_room(self, slabs: Ids) -> None:
        used, size = self._used[slabs], self._slab_pages[slabs]
        partly = (used > 0) & (used < size)
        self._room[self._slab_bucket[slabs], slabs] = np.where(partly, size - used, _NO_ROOM)

    # -- allocation

    def _allocate_in_one(self, bucket: int, count: int) -> Pages | None:
        """What ``_pick`` and ``_occupy`` do where one slab has it all, as nearly always; None where
        none has.
        """
        per_slab, room = self._per_slab[bucket], self._room[bucket]
        slab = int(room.argmin())
        free = int(room[slab])
        if count > (per_slab if free == _NO_ROOM else free):
            return None
        if free == _NO_ROOM:
            slab, free = int(self._take_slabs(bucket, 1)[0]), per_slab
        index = (self._states[slab, :per_slab] == _FREE).nonzero()[0][:count]
        self._states[slab, index] = _HELD
        self._references[slab * self._width + index] = 1
        self._used[slab] = per_slab - free + count
        room[slab] = free - count or _NO_ROOM
        self._counts[bucket, _FREE] -= count
        self._counts[bucket, _HELD] += count
        return (slab * self.layout.slab_units + index * self.layout.page_units[bucket]).astype(
            np.int32
        )

    def _pick(self, bucket: int, count: int) -> tuple[Ids, Ids]:
        """Rows of ``count`` free pages, and their slabs in the same order: the fullest slabs first,
        then new ones.

        Every slab but the last is used up. New slabs join the bucket; taking the pages is left to
        the caller.
        """
        per_slab, room = self._per_slab[bucket], self._room[bucket]
        ids = slabs = np.zeros(0, np.int64)
        if self._counts[bucket, _FREE]:
            slabs = np.flatnonzero(room != _NO_ROOM)
            slabs = slabs[np.argsort(room[slabs], kind="stable")]
            slabs = slabs[: int(np.searchsorted(np.cumsum(room[slabs]), count)) + 1]
            row, index = np.nonzero(self._states[slabs, :per_slab] == _FREE)
            ids = (slabs[row] * self._width + index)[:count]
        missing = count - len(ids)
        if missing > 0:
            fresh = self._take_slabs(bucket, ceil_div(missing, per_slab))
            more = (fresh[:, None] * self._width + np.arange(per_slab)).reshape(-1)[:missing]
            ids, slabs = np.concatenate([ids, more]), np.concatenate([slabs, fresh])
        return ids, slabs

    def _take_slabs(self, bucket: int, count: int) -> Ids:
        """Give free slabs to a bucket; their pages are free and theirs to hand out."""
        stop = self._num_free_slabs
        slabs = self._free_slabs[stop - count : stop][::-1].copy()
        self._num_free_slabs = stop - count
        self._slab_bucket[slabs] = bucket
        self._slab_pages[slabs] = self._per_slab[bucket]
        self._slab_page_units[slabs] = self.layout.page_units[bucket]
        self._counts[bucket, _FREE] += count * self._per_slab[bucket]
        return slabs

    def _occupy(self, bucket: int, ids: Ids, slabs: Ids) -> None:
        """Account for pages, as ``_pick`` returned them, that are free no longer."""
        self._counts[bucket, _FREE] -= len(ids)
        if not len(ids):
            return
        per_slab, room, last = self._per_slab[bucket], self._room[bucket], slabs[-1]
        used = int(np.count_nonzero(self._states[last]))
        self._used[slabs] = per_slab
        room[slabs] = _NO_ROOM
        self._used[last] = used
        room[last] = per_slab - used if used < per_slab else _NO_ROOM

    # -- compaction

    def _emptiest_movable(self, bucket: int) -> int | None:
        """The bucket's emptiest slab without pinned pages, if the other slabs have room for its
        pages.
        """
        room = self._room[bucket]
        if int(self._counts[bucket, _FREE]) < self._per_slab[bucket]:
            return None
        slabs = np.flatnonzero(room != _NO_ROOM)
        slabs = slabs[~np.isin(slabs, self._pinned // self._width)]
        return int(slabs[room[slabs].argmax()]) if len(slabs) else None

    def _empty_slab(self, bucket: int, slab: int) -> Moves:
        start = slab * self._width
        sources = start + np.flatnonzero(self._states[slab, : self._per_slab[bucket]])
        self._room[bucket, slab] = _NO_ROOM
        targets, slabs = self._pick(bucket, len(sources))
        self._references[targets] = self._references[sources]
        self._uses[targets] = self._uses[sources]
        self._in_flight[targets] = self._in_flight[sources]
        self._references[sources] = self._uses[sources] = self._in_flight[sources] = 0
        Remap(sources, targets).apply_all(rows for _, rows in self._limbo)
        states = self._flat_states[sources]
        self._flat_states[targets] = states
        self._counts[bucket] += np.bincount(states, minlength=_STATES)
        self._occupy(bucket, targets, slabs)
        moves = Moves(
            bucket=bucket,
            sources=self._pages(bucket, sources),
            targets=self._pages(bucket, targets),
            units=self.layout.page_units[bucket],
        )
        self._transition(sources, _FREE)
        self._vacate(sources)
        return moves

    def _pinned_by_bucket(self) -> tuple[list[int], list[int]]:
        """Pinned pages that are cached, and slabs with a pinned page, of every bucket."""
        buckets = len(self._per_slab)
        if not len(self._pinned):
            return [0] * buckets, [0] * buckets
        cached = self._pinned[self._flat_states[self._pinned] == _CACHED]
        slabs = np.unique(self._pinned // self._width)
        pages = np.bincount(self._slab_bucket[cached // self._width], minlength=buckets)
        return pages.tolist(), np.bincount(self._slab_bucket[slabs], minlength=buckets).tolist()

    # -- check

    def check(self) -> None:
        """Recompute every count from the pages themselves and assert conservation, in pages and in
        bytes. Slow.
        """
        layout, owned = self.layout, self._slab_bucket != _NO_BUCKET
        free = self._free_slabs[: self._num_free_slabs]
        assert len(np.unique(free)) == len(free), "a slab is on the free list twice"
        assert sorted(free.tolist()) == np.flatnonzero(~owned).tolist(), (
            "free list and slab owners disagree"
        )
        self._check_pages(owned)
        total_units = len(free) * layout.slab_units
        for bucket, per_slab in enumerate(self._per_slab):
            mine = np.flatnonzero(self._slab_bucket == bucket)
            tally = np.bincount(self._states[mine, :per_slab].reshape(-1), minlength=_STATES)
            assert tally.tolist() == self._counts[bucket].tolist(), (
                f"counts of bucket {bucket} are wrong"
            )
            counts = self.counts(bucket)
            pages = counts.free + counts.cached + counts.held + counts.limbo
            assert pages == len(mine) * per_slab, f"bucket {bucket} lost or made pages"
            total_units += pages * layout.page_units[bucket] + len(mine) * (
                layout.slab_units % layout.page_units[bucket]
            )
            used = (self._states[mine, :per_slab] != _FREE).sum(axis=1)
            assert (used == self._used[mine]).all() and (used > 0).all(), (
                "an empty slab is still owned"
            )
            room = np.full(layout.num_slabs, _NO_ROOM, np.int64)
            room[mine] = np.where(used < per_slab, per_slab - used, _NO_ROOM)
            assert (room == self._room[bucket]).all(), f"room of bucket {bucket} is wrong"
        assert (
            total_units * layout.unit_bytes
            == layout.num_slabs * layout.slab_units * layout.unit_bytes
        ), "bytes got lost"

    def _check_pages(self, owned: npt.NDArray[np.bool_]) -> None:
        states, references, uses, pins = self._flat_states, self._references, self._uses, self._pins
        assert (references >= 0).all() and (uses >= 0).all() and (pins >= 0).all(), (
            "a count is negative"
        )
        assert ((references > 0) == (states == _HELD)).all(), "held if and only if referenced"
        assert (self._in_flight <= references).all(), "steps take over what there is"
        assert (((references == 0) & (uses > 0)) == (states == _CACHED)).all(), (
            "cached if and only if only used"
        )
        assert ((pins == 0) | (references + uses > 0)).all(), (
            "a pinned page is neither held nor cached"
        )
        assert (np.flatnonzero(pins) == self._pinned).all(), "the list of pinned pages is wrong"
        rows = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in self._limbo)])
        assert (np.bincount(rows, minlength=len(states)) == self._in_flight).all(), (
            "limbo lists are wrong"
        )
        beyond = np.arange(self._width) >= self._slab_pages[:, None]
        assert not self._states[beyond].any(), (
            "a page beyond its slab's end, or in a slab nobody has, is in use"
        )
        assert (self._used[~owned] == 0).all() and (self._slab_page_units[~owned] == 1).all(), (
            "a free slab is not blank"
        )


def _tally(ids: Ids) -> tuple[Ids, Any]:
    """Unique ids ascending, and how often each occurs (1 where all occur once)."""
    if len(ids) < 2:
        return ids, 1
    ordered = np.sort(ids)
    new = ordered[1:] != ordered[:-1]
    if new.all():
        return ordered, 1
    edges = np.concatenate([[0], new.nonzero()[0] + 1, [len(ordered)]])
    return ordered[edges[:-1]], (edges[1:] - edges[:-1]).astype(np.int32)
