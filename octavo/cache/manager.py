"""The hybrid KV cache as the scheduler sees it.

Owns ``KVCacheManager``: look up, admit, extend, commit, free, explain. Turns requests into table
rows and tokens into keys, decides what is charged at admission, and remembers what steps in flight
still owe. Knows no kinds, no clock, no tensors.

The life of a request: ``lookup`` and ``can_admit`` (questions) → ``admit`` (takes a row and
what the hit offers; ``fork`` takes what another request has) → ``extend`` for every step (takes
pages) → ``commit`` at the step's receipt (publishes) → ``free``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.base import CapacityError, Handling, ceil_div, floor_to
from octavo.cache.block_plan import NEVER
from octavo.cache.checkpoints import CheckpointPolicy
from octavo.cache.coordinator import KVCacheCoordinator
from octavo.cache.group_step import CopyJob, GroupStep
from octavo.cache.hashing import PrefixHasher, root_key
from octavo.cache.hits import EMPTY, Match
from octavo.cache.index.policy import DEFAULT_POLICY
from octavo.cache.layout import (
    CacheLayout,
    lone_pages,
    longest_request,
    pages_by_bucket,
    slabs_needed,
)
from octavo.cache.report import CacheReport, GroupReport, HitExplanation, MissCause


class CachedRequest(Protocol):
    """What the cache must know of a request: its tokens, and what separates it from or ties it to
    others.
    """

    request_id: str
    cache_salt: str
    marks: tuple[int, ...]
    unit_keys: np.ndarray
    num_cached_tokens: int
    cache_report: Any

    @property
    def num_tokens(self) -> int:
        """Tokens known."""

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)``, int32."""


_NO_STEP = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookup:
    """What a probe found for a request. All counts are tokens.

    hit: can be resumed there. matched: the growing groups have that much. remembered: keys known
        once, ghosts included.
    promised: a step in flight will make a longer hit possible.
    """

    match: Match
    hit: int
    matched: int
    remembered: int
    promised: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Admission:
    """A request that fits now, on its hit. junctions: checkpoints that it owes others, in tokens.
    publishes: its tokens enter the prefix cache.
    """

    request: CachedRequest
    match: Match
    junctions: tuple[int, ...]
    publishes: bool


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A request that does not fit now. missing_slabs: by how much; 0 where a row is missing."""

    missing_slabs: int


@dataclass(eq=False)
class _Row:
    """A running request. ``shared``: tokens that growing groups had at admission. ``junctions``:
    checkpoints it owes others.
    """

    request: CachedRequest
    row: int
    shared: int
    junctions: tuple[int, ...]
    publishes: bool


class KVCacheManager:
    """One per engine. ``enable_prefix_caching=False`` runs the same code and finds and publishes
    nothing.

    eviction: name of the policy by which victims are ranked. hash_seed: per-server secret.
    model_digest: whatever else changes the bytes (weights, dtype, layout version).
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        hash_seed: int = 0,
        model_digest: bytes = b"",
        checkpoint_interval: int | None = None,
        eviction: str = DEFAULT_POLICY,
    ) -> None:
        self.layout, self._unit, self._seed = layout, layout.hash_unit, hash_seed
        self._hasher = PrefixHasher(unit=layout.hash_unit, seed=hash_seed)
        self._digest, self._caching = model_digest, enable_prefix_caching
        self.coordinator = KVCacheCoordinator(layout, rows=max_num_seqs, eviction=eviction)
        self.checkpoints = CheckpointPolicy(unit=layout.hash_unit, interval=checkpoint_interval)
        self._rows: dict[str, _Row] = {}
        self._by_row: dict[int, _Row] = {}
        # Tokens that running requests had when they came, 0 where a row is free.
        self._known = np.zeros(max_num_seqs, np.int64)
        self._computed = np.zeros(max_num_seqs, np.int64)
        self._scheduled = np.zeros(max_num_seqs, np.int64)
        self._last_step = np.full(max_num_seqs, _NO_STEP, np.int64)
        self._peak_bytes = np.zeros(max_num_seqs, np.int64)
        # Rows that share no block they may write into, and rows that leave checkpoints behind while
        # decoding.
        self._settled, self._rolling = np.zeros(max_num_seqs, bool), np.zeros(max_num_seqs, bool)
        # The first checkpoint still to be planned, and the first that waits for its receipt.
        self._next_wanted = np.full(max_num_seqs, NEVER, np.int64)
        self._next_mark = np.full(max_num_seqs, NEVER, np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._resting: list[tuple[int, int]] = []
        # What steps in flight will make resumable: the keys of a request, and the units after which
        # it will be.
        self._owed: dict[str, list[tuple[np.ndarray, Sequence[int]]]] = {}

    # -- probes ------------------------------------------------------------------------------------

    def keys(self, request: CachedRequest, n: int) -> np.ndarray:
        """Keys (KEY) of the whole units of the first ``n`` tokens, made once and kept on the
        request.
        """
        if len(request.unit_keys) * self._unit + self._unit <= n:
            root = root_key(self._digest, request.cache_salt.encode(), seed=self._seed)
            request.unit_keys = self._hasher.extend(
                request.unit_keys, request.token_ids(0, n), root=root
            )
        return request.unit_keys[: n // self._unit]

    def lookup(self, request: CachedRequest) -> Lookup:
        """How much of a request the cache has. At least its last token remains to be computed.
        Changes nothing but keys.
        """
        if not self._caching:
            return Lookup(match=EMPTY, hit=0, matched=0, remembered=0, promised=False)
        known = request.num_tokens
        keys, limit = self.keys(request, known), (known - 1) // self._unit
        match = self.coordinator.lookup(keys, limit)
        remembered = self.coordinator.index.ghost_match(keys, match.matched)
        promised = any(
            self._owes(*owed, keys[:limit], match.hit)
            for given in self._owed.values()
            for owed in given
        )
        return Lookup(
            match=match,
            hit=match.hit * self._unit,
            matched=match.matched * self._unit,
            remembered=remembered * self._unit,
            promised=promised,
        )

    @staticmethod
    def _owes(owed: np.ndarray, ends: Sequence[int], keys: np.ndarray, hit: int) -> bool:
        """Will a hit of more than ``hit`` units be possible? What differs at the first end behind
        it differs for good.
        """
        at = bisect_right(ends, hit)
        return (
            at < len(ends)
            and ends[at] <= len(keys)
            and owed[ends[at] - 1].tobytes() == keys[ends[at] - 1].tobytes()
        )

    def check_capacity(self, tokens: int) -> None:
        """Raise CapacityError, with the arithmetic, where a request of ``tokens`` tokens could
        never be served alone.

        Charged: what its laws can need, and one block per group for a shared block being copied.
        """
        pages, arena = lone_pages(self.layout, tokens), self.layout.arena
        slabs = slabs_needed(self.layout, pages)
        if slabs > arena.num_slabs:
            need, have = slabs * arena.slab_units, arena.num_slabs * arena.slab_units
            parts = " + ".join(
                f"{count} pages of {group.page_units * arena.unit_bytes:,} B"
                f" ({group.group.law.describe()})"
                for count, group in zip(pages, self.layout.groups, strict=True)
            )
            raise CapacityError(
                f"a request of {tokens:,} tokens needs {parts}: {slabs} slabs ="
                f" {need * arena.unit_bytes:,} B, but the cache has {arena.num_slabs} slabs ="
                f" {have * arena.unit_bytes:,} B, enough for"
                f" {longest_request(self.layout, tokens):,} tokens; raise kv_memory or send less"
            )

    def explain(self, request: CachedRequest, found: Lookup | None = None) -> HitExplanation:
        """Why a lookup of this request finds what it finds now (or found). Changes nothing."""
        found, groups = found or self.lookup(request), self.coordinator.groups
        laws = [group.law.describe() for group in groups]
        limit = floor_to(request.num_tokens - 1, self._unit)
        reach = tuple(
            (law, units * self._unit) for law, units in zip(laws, found.match.reach, strict=False)
        )
        least = min((tokens for _, tokens in reach), default=0)
        short = tuple(law for law, tokens in reach if tokens == least and tokens < limit)
        if not self._caching:
            cause, reason = MissCause.OFF, "prefix caching is off"
        elif found.hit == limit:
            cause, reason = MissCause.NONE, "everything that may be reused was"
        elif found.hit < min(found.matched, limit):
            whom = ", ".join(short) or "all groups together"
            cause = MissCause.NO_CHECKPOINT
            reason = f"no checkpoint between tokens {found.hit} and {found.matched} for {whom}"
        elif found.remembered > found.matched:
            cause = MissCause.EVICTED
            reason = (
                f"tokens {found.matched} to {found.remembered} were cached and have been evicted"
            )
        else:
            cause = MissCause.NEVER_CACHED
            reason = (
                f"never cached: the key differs in tokens {found.matched} to"
                f" {found.matched + self._unit}"
            )
        return HitExplanation(
            prompt_tokens=request.num_tokens,
            hit_tokens=found.hit,
            matched_tokens=found.matched,
            reach=reach,
            limited_by=short,
            cause=cause,
            reason=reason,
        )

    def row(self, request: CachedRequest) -> int:
        """The table row of a running request."""
        return self._rows[request.request_id].row

    def computed(self, request: CachedRequest) -> int:
        """Tokens whose steps have been received."""
        return int(self._computed[self.row(request)])

    def scheduled(self, request: CachedRequest) -> int:
        """Tokens whose steps have been planned."""
        return int(self._scheduled[self.row(request)])

    @property
    def requests(self) -> tuple[CachedRequest, ...]:
        """Requests that have a row, in order of admission."""
        return tuple(row.request for row in self._rows.values())

    def running(self, request: CachedRequest) -> bool:
        """Does the request have a row?"""
        return request.request_id in self._rows

    # -- admission ---------------------------------------------------------------------------------

    def can_admit(
        self, request: CachedRequest, found: Lookup, *, cold: bool = False
    ) -> Admission | Refusal:
        """Does a request's whole prompt fit, on its hit, beside what running requests still need?
        Changes nothing; ``admit`` carries an admission out as long as nothing else has happened.

        cold: ignore the cache, and keep out of it.
        """
        if not self._free_rows:
            return Refusal(missing_slabs=0)
        match = EMPTY if cold else found.match
        demand = self._demand(match, request.num_tokens)
        held = self.coordinator.newly_held(match)
        wanted = [more + now for more, now in zip(demand, held, strict=True)]
        if short := self.coordinator.pool.shortfall(wanted):
            return Refusal(missing_slabs=short)
        junctions = {found.matched, found.remembered}
        return Admission(
            request=request,
            match=match,
            junctions=tuple(n for n in junctions if n > match.hit * self._unit),
            publishes=self._caching and not cold,
        )

    def _demand(self, match: Match, tokens: int) -> list[int]:
        """Pages per bucket that a new row of ``tokens`` tokens on a match, unfinished prompts, and
        the rings of all running rows will still ask for.

        A ring that is not full now fills again, so that running requests never lose to one that
        came after them.
        """
        rows = self._known.nonzero()[0]
        known = np.maximum(self._known[rows], self._scheduled[rows])
        unfinished = self._computed[rows] + 1 < self._known[rows]
        wanted, shared = [], match.matched * self._unit
        for table in self.coordinator.groups:
            layout = table.layout
            missing = table.missing(rows, layout.most_pages(known))
            most = layout.most_pages(tokens)
            if layout.fixed is None:
                missing = missing[unfinished]
                # On shared pages, but for the block in which they end: that one is copied.
                most = max(0, most - ceil_div(shared, layout.block_tokens))
                most += shared % layout.block_tokens > 0
            wanted.append(int(missing.sum()) + most)
        return pages_by_bucket(self.layout, wanted)

    def admit(self, admission: Admission) -> None:
        """Give a request a row and its hit, as ``can_admit`` has found it."""
        request, match, row = admission.request, admission.match, self._free_rows.pop()
        self.coordinator.adopt(row, match)
        if len(match.nodes):
            self.coordinator.chains.touch(row, resumed=match.hit)
        self._rows[request.request_id] = self._by_row[row] = _Row(
            request=request,
            row=row,
            shared=match.matched * self._unit,
            junctions=admission.junctions,
            publishes=admission.publishes,
        )
        self._enter(self._by_row[row], match.hit * self._unit)
        self._next_wanted[row] = self._first_wanted(self._by_row[row])

    def fork(self, source: CachedRequest, request: CachedRequest) -> bool:
        """Give ``request``, whose tokens begin with the computed ones of ``source``, a row on the
        same pages.

        Whoever writes into a shared page copies it first. False, and nothing changed, where no row
        is free.
        """
        if not self._free_rows:
            return False
        origin, row = self._rows[source.request_id], self._free_rows.pop()
        n = int(self._computed[origin.row])
        assert n == self._scheduled[origin.row], "forks are made at a receipt"
        self.coordinator.fork(origin.row, row, n)
        request.unit_keys, request.num_cached_tokens = source.unit_keys, source.num_cached_tokens
        self._rows[request.request_id] = self._by_row[row] = _Row(
            request=request,
            row=row,
            shared=origin.shared,
            junctions=(),
            publishes=origin.publishes,
        )
        self._enter(self._by_row[row], n)
        self._next_wanted[row] = NEVER
        return True

    def _enter(self, row: _Row, n: int) -> None:
        """A row begins with ``n`` tokens on pages that others may have, too."""
        self._known[row.row] = row.request.num_tokens
        self._computed[row.row] = self._scheduled[row.row] = n
        self._last_step[row.row], self._settled[row.row] = _NO_STEP, False
        self._rolling[row.row] = row.publishes and bool(self.coordinator.rolling.rolling)
        self._peak_bytes[row.row] = self.coordinator.held_bytes(row.row)

    # -- steps -------------------------------------------------------------------------------------

    def extend(
        self, request: CachedRequest, stop: int, step: int, *, checkpoints: bool = True
    ) -> bool:
        """Take the pages that computing up to ``stop`` tokens writes. False, and nothing changed,
        where they do not fit.
        """
        row = self._rows[request.request_id]
        start, rows = int(self._scheduled[row.row]), np.array([row.row])
        if stop - start == 1 and self._decodes(rows, self._scheduled[rows])[0]:
            if not self._decode(rows, self._scheduled[rows], step, checkpoints=checkpoints):
                return False
            self._scheduled[row.row], self._last_step[row.row] = stop, step
            return True
        marks: tuple[int, ...] = ()
        if checkpoints and row.publishes and self.coordinator.bounded:
            hints = (*row.junctions, *request.marks)
            marks = self.checkpoints.positions(
                start=start, stop=stop, known=request.num_tokens, marks=hints
            )
        plan = self.coordinator.plan(row.row, start, stop, marks=marks, shared=row.shared)
        if not self.coordinator.extend(plan, step):
            return False
        self._scheduled[row.row], self._last_step[row.row] = stop, step
        self._next_wanted[row.row] = self._first_wanted(row)
        if marks:
            self._next_mark[row.row] = min(int(self._next_mark[row.row]), marks[0])
        self._note_peak(row.row)
        self._settled[row.row] = stop > row.shared
        if row.publishes and stop - start > 1:
            self._announce(row, start, stop, marks)
        return True

    def decode(self, rows: np.ndarray, step: int) -> np.ndarray:
        """Plan one more token of these rows, taking the pages it is written to in one go. Bool [R]:
        is it planned?

        The others, of which nothing changed, must be extended one by one: all that need pages where
        not all of those fit, and rows that owe a lasting checkpoint or share the block they write
        into.
        """
        start = self._scheduled[rows]
        planned = ~self.coordinator.schedule.due(rows, start)
        if np.count_nonzero(planned) < len(rows):
            due = np.flatnonzero(~planned)
            together = due[self._decodes(rows[due], start[due])]
            planned[together] = self._decode(
                rows[together], start[together], step, checkpoints=True
            )
            rows, start = rows[planned], start[planned]
        self._scheduled[rows], self._last_step[rows] = start + 1, step
        return planned

    def _decodes(self, rows: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Bool [R]: rows whose next token completes no checkpoint and goes into a block that is
        theirs, or new.
        """
        return (
            self._settled[rows] & (self._next_wanted[rows] != start + 1) & ~self._completes(start)
        )

    def _completes(self, start: np.ndarray) -> np.ndarray:
        return self.checkpoints.completes(start) & bool(self._caching and self.coordinator.bounded)

    def _decode(self, rows: np.ndarray, start: np.ndarray, step: int, *, checkpoints: bool) -> bool:
        rolls = self._rolling[rows] & self.checkpoints.rolls(start) & checkpoints
        if not self.coordinator.decode(rows, start, step, rolls):
            return False
        if self.coordinator.hands_back:
            held = self.coordinator.table_bytes(rows)
            self._peak_bytes[rows] = np.maximum(self._peak_bytes[rows], held)
        self._look_ahead(rows, start + 1)
        return True

    def _note_peak(self, row: int) -> None:
        """Remember what a row holds now. Between two chunks tables only grow, unless a law hands
        pages back.
        """
        held = self.coordinator.held_bytes(row)
        self._peak_bytes[row] = max(int(self._peak_bytes[row]), held)

    def _look_ahead(self, rows: np.ndarray, n: np.ndarray) -> None:
        """Note when rows with ``n`` planned tokens need the cache next."""
        limit = self._next_wanted[rows] - 1
        if self._caching and self.coordinator.bounded:
            limit = np.minimum(limit, self.checkpoints.next_start(n, self._rolling[rows]))
        self.coordinator.schedule.look_ahead(rows, limit)

    def _first_wanted(self, row: _Row) -> int:
        """The first checkpoint behind what is scheduled, of those that do not depend on the cutting
        into steps.
        """
        if not (row.publishes and self.coordinator.bounded):
            return NEVER
        hints = (*row.junctions, *row.request.marks, row.request.num_tokens - 1)
        behind = (floor_to(hint, self._unit) for hint in hints)
        return min((mark for mark in behind if mark > self._scheduled[row.row]), default=NEVER)

    def _announce(self, row: _Row, start: int, stop: int, marks: Sequence[int]) -> None:
        """Note which prefixes can be resumed once this step is received, for requests that had
        better wait.
        """
        keys = self.keys(row.request, stop)
        ends: Sequence[int] = [mark // self._unit for mark in marks]
        if not self.coordinator.bounded:
            ends = range(start // self._unit + 1, len(keys) + 1)
        if ends:
            self._owed.setdefault(row.request.request_id, []).append((keys, ends))

    def commit(self, rows: np.ndarray, stop: np.ndarray) -> None:
        """The step that computed rows up to ``stop`` tokens has been received: what it wrote is
        valid and may be shared.

        Parts of prompts are published, and whatever completes a checkpoint; generated tokens when
        the request leaves.
        """
        several = stop - self._computed[rows] > 1
        self._computed[rows] = stop
        for index in (several | (self._next_mark[rows] <= stop)).nonzero()[0].tolist():
            row = self._by_row[int(rows[index])]
            with Handling(row.request.request_id):
                if self._scheduled[row.row] == stop[index]:
                    self._owed.pop(row.request.request_id, None)
                if row.publishes:
                    self._publish(row, int(stop[index]))

    def _publish(self, row: _Row, n: int) -> None:
        """Publish the first ``n`` tokens; pages given up wait only where a later step of the row is
        in flight.
        """
        step = int(self._last_step[row.row]) if self._scheduled[row.row] > n else None
        planned = int(self._scheduled[row.row])
        self.coordinator.publish(row.row, self.keys(row.request, n), step)
        self.coordinator.claim_promised(row.row, n, planned, step)
        self._next_mark[row.row] = self.coordinator.next_promise(row.row)
        self.coordinator.schedule.ask(row.row, planned)

    def free(
        self, request: CachedRequest, *, in_flight: bool = False, publish: bool = True
    ) -> None:
        """End a request's stay: publish what it has, as a place to resume where possible, and let
        its pages go.

        in_flight: a step that has not been received may still touch the pages; they wait for it.
        publish: False where what was written cannot be trusted.
        """
        row = self._rows.pop(request.request_id)
        del self._by_row[row.row]
        self._owed.pop(request.request_id, None)
        if row.publishes and publish and not in_flight:
            self._publish_end(row)
        self._note_peak(row.row)
        request.cache_report = self._report(row)
        self.coordinator.chains.touch(row.row)
        self._next_mark[row.row], self._known[row.row] = NEVER, 0
        step = int(self._last_step[row.row])
        self.coordinator.clear(row.row, step if in_flight else None)
        if in_flight:
            self._resting.append((step, row.row))
        else:
            self._free_rows.append(row.row)

    def _publish_end(self, row: _Row) -> None:
        computed, planned = int(self._computed[row.row]), int(self._scheduled[row.row])
        self._publish(row, computed)
        ends = (floor_to(computed, self._unit), int(self.coordinator.rolling.kept_at[row.row]))
        for end in ends if self.coordinator.bounded else ():
            if end and self.coordinator.claim_end(row.row, end, planned):
                return

    def receive(self, step: int) -> None:
        """A step's receipt has arrived: what it kept from being reused is free."""
        self.coordinator.pool.retire(step)
        self._free_rows += [row for tag, row in self._resting if tag <= step]
        self._resting = [(tag, row) for tag, row in self._resting if tag > step]

    def clear_prefixes(self) -> None:
        """Forget every cached prefix that no running request stands on."""
        self.coordinator.index.clear()

    # -- the step plan -----------------------------------------------------------------------------

    def scheduled_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens whose steps have been planned, per row."""
        return self._scheduled[rows]

    def take_step(
        self, rows: np.ndarray, start: np.ndarray, query_start: np.ndarray
    ) -> tuple[tuple[GroupStep, ...], tuple[CopyJob, ...]]:
        """Every group's part of the step over ``rows``, after their extensions, and the copies that
        must run before it. With this the step is the runner's, and the next one begins.

        rows, start: int64 [R], table rows and the first token of each. query_start: [R + 1], where
        its tokens begin among all.
        """
        underway = self.coordinator.underway
        return underway.take_groups(rows, start, query_start), underway.take_copies()

    # -- reports -----------------------------------------------------------------------------------

    def report(self, request_id: str) -> CacheReport:
        """What a running request holds."""
        self._note_peak(self._rows[request_id].row)
        return self._report(self._rows[request_id])

    def _report(self, row: _Row) -> CacheReport:
        groups, computed = [], int(self._computed[row.row])
        for group in self.coordinator.groups:
            layout, blocks = group.layout, int(group.num_blocks(np.array([row.row]))[0])
            streams = [member.stream for member in layout.group.members]
            groups.append(
                GroupReport(
                    law=group.law.describe(),
                    layers=layout.group.layers,
                    block_tokens=layout.block_tokens,
                    blocks=blocks,
                    bytes=blocks * layout.page_units * self.layout.arena.unit_bytes,
                    uniform_bytes=sum(
                        computed // stream.stride * stream.entry_bytes for stream in streams
                    ),
                )
            )
        return CacheReport(
            tokens=computed,
            cached_tokens=row.request.num_cached_tokens,
            groups=tuple(groups),
            peak_bytes=int(self._peak_bytes[row.row]),
        )

    def check(self) -> None:
        """Assert every invariant, from scratch."""
        self.coordinator.check(self._scheduled)
        assert (
            len(self._rows) + len(self._free_rows) + len(self._resting)
            == self.coordinator.groups[0].table.shape[0]
        )
        assert (self._computed <= self._scheduled).all()
        assert sorted(row.row for row in self._rows.values()) == sorted(self._by_row)
