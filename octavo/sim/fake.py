"""A runner without tensors: shadow memory that knows which entry lies in every row, and checks each
read and write.

Owns the truth about each request (its tokens need no cache to be known) and the shadow of the
arena. Knows plans and layouts; knows no scheduler and no cache manager, so it cannot repeat their
mistakes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from octavo.base import Interval, block_range
from octavo.cache.layout import CacheLayout
from octavo.sched.sampling import SamplingParams
from octavo.sched.step import CopyJob, GroupStep, StepPlan, StepResult, TokenLogprobs
from octavo.sched.structured import Constraint
from octavo.spec.law import Law

Record = tuple[int, int]
"""What an entry is: its position, and the hash of all the request's tokens up to and including it.
"""

Place = tuple[int, int]
"""A page as one group sees it: (group, unit offset)."""

_MASK = (1 << 64) - 1


class Violation(AssertionError):
    """A plan read an entry that is not there, or wrote where it must not."""


def mix(seed: int, value: int) -> int:
    """One step of a 64-bit hash chain (the finaliser of splitmix64): equal on every machine and
    Python.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + value + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


@dataclass(kw_only=True)
class Truth:
    """All tokens a request will ever have, known without any cache.

    The sampled token after n tokens is a function of their hash, of ``params.seed`` and of the
    branch over ``vocab_size`` tokens, unless ``answer`` tells it. Records are a function of tokens
    only: branches of one prompt have its records in common.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str
    vocab_size: int
    branch: int = 0
    ends: frozenset[int] = frozenset()
    answer: Sequence[int] = ()
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token in self.prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        last = (
            self.records[-1][1]
            if self.records
            else mix(0, sum(ord(c) << 8 * i for i, c in enumerate(self.salt)))
        )
        self.records.append((len(self.tokens), mix(last, token)))
        self.tokens.append(token)

    def reach(self, n: int) -> None:
        """Make the first ``n`` tokens known."""
        while len(self.tokens) < n:
            self._append(self._sample())

    def _sample(self) -> int:
        place = len(self.tokens) - len(self.prompt)
        if place < len(self.answer):
            return self.answer[place]
        made = mix(self.records[-1][1], self.params.seed or 0)
        return (mix(made, self.branch) if self.branch else made) % self.vocab_size

    def fork(self, branch: int) -> Truth:
        """The truth of another continuation of the prompt."""
        return replace(self, branch=branch, tokens=[], records=[])

    def token(self, position: int) -> int:
        """The token at a position."""
        self.reach(position + 1)
        return self.tokens[position]

    def output(self, length: int) -> list[int]:
        """The first ``length`` tokens after the prompt."""
        self.reach(len(self.prompt) + length)
        return self.tokens[len(self.prompt) : len(self.prompt) + length]


@dataclass(kw_only=True)
class ShadowPage:
    """What lies in one page: the group whose layout it was written in, and a record per row."""

    group: int
    units: int
    rows: list[Record | None]


class ShadowArena:
    """Records instead of bytes. Pages of different sizes lie over one another: a write in one
    breaks the others.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.pages: dict[int, ShadowPage] = {}
        self._starts: list[int] = []
        self._longest = max(group.page_units for group in layout.groups)

    def page(self, start: int) -> ShadowPage | None:
        """The page written at unit ``start``, unless something was written over it."""
        return self.pages.get(start)

    def claim(self, start: int, group: int) -> ShadowPage:
        """The page at ``start`` in the layout of ``group``; what lay there in another layout is
        gone.
        """
        page = self.pages.get(start)
        if page is not None and page.group == group:
            return page
        layout = self.layout.groups[group]
        return self.place(
            start,
            ShadowPage(group=group, units=layout.page_units, rows=[None] * layout.block_tokens),
        )

    def place(self, start: int, page: ShadowPage) -> ShadowPage:
        """Put a whole page at ``start``. Raises Violation where it would leave the arena or cross a
        slab's border.
        """
        slab = self.layout.arena.slab_units
        if (
            start < 0
            or start + page.units > self.layout.arena.scratch_unit
            or start // slab != (start + page.units - 1) // slab
        ):
            raise Violation(
                f"page at unit {start} of {page.units} units lies outside the arena or across two"
                " slabs"
            )
        self.wipe(start, page.units)
        self.pages[start] = page
        insort(self._starts, start)
        return page

    def wipe(self, start: int, units: int) -> None:
        """Forget every page that touches units ``[start, start + units)``."""
        low, high = (
            bisect_right(self._starts, start - self._longest),
            bisect_left(self._starts, start + units),
        )
        for near in self._starts[low:high]:
            if near + self.pages[near].units > start:
                del self.pages[near]
                self._starts.remove(near)

    def copy(self, job: CopyJob) -> None:
        """Run one copy job. A source that holds nothing known makes the target unknown too."""
        if abs(job.source - job.target) < job.units:
            raise Violation(
                f"copy from unit {job.source} to {job.target} of {job.units} units overlaps itself"
            )
        page = self.pages.get(job.source)
        if page is None or page.units != job.units:
            self.wipe(job.target, job.units)
            return
        self.place(job.target, ShadowPage(group=page.group, units=page.units, rows=list(page.rows)))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One request's share of one group's step."""

    index: int
    request_id: str
    start: int
    stop: int
    fresh: bool
    truth: Truth


def read_intervals(law: Law, part: Part) -> tuple[Interval, ...]:
    """Tokens whose entries must come from pages while tokens ``[start, stop)`` are computed.

    Fresh: the past of every token, up to ``start``. Write first: the past of every token and the
        token itself.
    """
    limit, last = part.start if part.fresh else part.stop, part.stop - 1
    if law.needs(last) == ((0, last),):
        return ((0, limit),) if limit else ()
    wanted: set[Interval] = set() if part.fresh else {(part.start, part.stop)}
    for token in range(part.start, part.stop):
        needs = law.needs(token)
        wanted.update((start, min(stop, limit)) for start, stop in needs if start < limit)
        if part.fresh and law.first(token) >= limit:
            break
    return _union(wanted)


def _union(intervals: set[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(kw_only=True)
class Traffic:
    """Rows, as bit masks, that each request read and wrote in one step, by (group, page)."""

    reads: dict[Place, dict[str, int]] = field(default_factory=dict)
    writes: dict[Place, tuple[str, int]] = field(default_factory=dict)

    def note_read(self, group: int, page: int, request_id: str, mask: int) -> None:
        """Rows ``mask`` of a page were read."""
        readers = self.reads.setdefault((group, page), {})
        readers[request_id] = readers.get(request_id, 0) | mask

    def note_write(self, group: int, page: int, request_id: str, mask: int) -> str:
        """Rows ``mask`` of a page were written; returns who wrote there first in this step."""
        first, masks = self.writes.get((group, page), (request_id, 0))
        self.writes[group, page] = (first, masks | mask)
        return first


class Watch(Protocol):
    """Probes of the cache that tell the runner what a plan may write, asked right after the plan
    was made.
    """

    def shared_rows(self) -> Mapping[Place, int]:
        """Leading rows of every page that the prefix index offers to others."""

    def held(self, request_id: str, group: int) -> Container[int]:
        """Pages that a request has references on."""


class FakeRunner:
    """Executes plans on a ShadowArena. Raises Violation at the first read or write that a real
    model would be wrong by.

    watch: without it, only what plans themselves give away is checked. The memory of this runner is
        its own.
    """

    def __init__(
        self, layout: CacheLayout, *, vocab_size: int = 2, watch: Watch | None = None
    ) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        self.arena = ShadowArena(layout)
        self.truths: dict[str, Truth] = {}
        self.entries_read = 0
        self.entries_written = 0
        self._watch = watch
        self._shared: Mapping[Place, int] = {}
        self._in_flight: dict[int, Traffic] = {}

    def register(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: str = "",
        *,
        branch: int = 0,
        ends: frozenset[int] = frozenset(),
        answer: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> Truth:
        """Tell the runner of a request before its first step; of a fork, whose first token its
        parent's step makes, before its second token.

        ends: tokens that would end its text. answer: its first tokens behind the prompt, where they
        are known; the others are made up. constraint: its own, which no other
        request has.
        """
        truth = Truth(
            prompt=tuple(prompt),
            params=params,
            salt=salt,
            vocab_size=self.vocab_size,
            branch=branch,
            ends=ends,
            answer=answer,
            constraint=constraint,
        )
        self.truths[request_id] = truth
        return truth

    def forget(self, request_id: str) -> None:
        """A request is over; a plan that names it again is an error."""
        del self.truths[request_id]

    def settle(self, step: int) -> None:
        """The receipt of a step has been given to the scheduler: what it read may be written
        again.
        """
        self._in_flight.pop(step, None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and sample."""
        parts = self._parts(plan)
        self._shared = self._watch.shared_rows() if self._watch else {}
        for job in plan.copies:
            self.arena.copy(job)
            self._excuse(job.source)
        traffic = Traffic()
        for group, step in enumerate(plan.groups):
            self._run_group(group, step, parts[group], plan, traffic)
        self._check_traffic(plan, traffic)
        self._in_flight[plan.step] = traffic
        return self._sample(plan)

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens: dict[str, int] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        for i in np.flatnonzero(plan.samples).tolist():
            truth, stop = self.truths[plan.request_ids[i]], int(plan.stop[i])
            branches = [
                truth,
                *(truth.fork(branch) for branch, _ in enumerate(plan.forks.get(i, ()), 1)),
            ]
            for name, one in zip(
                (plan.request_ids[i], *plan.forks.get(i, ())), branches, strict=True
            ):
                tokens[name] = one.token(stop)
                if one.params.logprobs is not None:
                    logprobs[name] = likelihood(one, stop)
        scored = {}
        for i, given in plan.scored.items():
            name, first = plan.request_ids[i], int(plan.start[i]) + 1
            scored[name] = [
                likelihood(self.truths[name], place) for place in range(first, first + len(given))
            ]
        return StepResult(step=plan.step, tokens=tokens, logprobs=logprobs, scored=scored)

    def _excuse(self, page: int) -> None:
        """A page that a later step has copied away may be written by it: copies run behind the
        steps that are in flight.
        """
        for traffic in self._in_flight.values():
            for key in [key for key in traffic.reads if key[1] == page]:
                del traffic.reads[key]

    def lose(self, plan: StepPlan) -> StepResult:
        """A step that fails: everything it would have written is garbage, copies included, and
        nothing is sampled.
        """
        for job in plan.copies:
            self.arena.wipe(job.target, job.units)
        for group, step in enumerate(plan.groups):
            for page, row in zip(step.write_page.tolist(), step.write_row.tolist(), strict=True):
                if page >= 0:
                    self.arena.claim(page, group).rows[row] = None
        return StepResult(step=plan.step, tokens={}, failed=True)

    def _parts(self, plan: StepPlan) -> list[list[Part]]:
        """Every request's share per group, after checking that the plan asks for the right
        tokens.
        """
        if len(plan.groups) != len(self.layout.groups):
            raise Violation(
                f"step {plan.step} has {len(plan.groups)} groups, the layout"
                f" {len(self.layout.groups)}"
            )
        if len(set(plan.request_ids)) != len(plan.request_ids):
            raise Violation(f"step {plan.step} names a request twice: {plan.request_ids}")
        parts: list[list[Part]] = [[] for _ in plan.groups]
        for i, name in enumerate(plan.request_ids):
            truth = self.truths.get(name)
            if truth is None:
                raise Violation(
                    f"step {plan.step} computes {name}, which is over or was never added"
                )
            start, stop = int(plan.start[i]), int(plan.stop[i])
            self._check_tokens(plan, i, truth)
            for group, step in enumerate(plan.groups):
                fresh = bool(step.fresh[i])
                parts[group].append(
                    Part(index=i, request_id=name, start=start, stop=stop, fresh=fresh, truth=truth)
                )
        return parts

    def _check_tokens(self, plan: StepPlan, i: int, truth: Truth) -> None:
        name, start, stop = plan.request_ids[i], int(plan.start[i]), int(plan.stop[i])
        first, last = int(plan.query_start[i]), int(plan.query_start[i + 1])
        if not 0 <= start < stop or last - first != stop - start:
            raise Violation(f"{name}: tokens [{start}, {stop}) are given as rows [{first}, {last})")
        truth.reach(stop)
        if plan.token_ids[first:last].tolist() != truth.tokens[start:stop]:
            given, true = plan.token_ids[first:last].tolist(), truth.tokens[start:stop]
            raise Violation(f"{name}: tokens [{start}, {stop}) are {given}, should be {true}")
        known = len(truth.prompt) + int(plan.output_len[i])
        if bool(plan.samples[i]) != (stop == known):
            raise Violation(
                f"{name}: samples is {bool(plan.samples[i])} at {stop} of {known} known tokens"
            )
        self._check_options(plan, i, truth)

    def _check_options(self, plan: StepPlan, i: int, truth: Truth) -> None:
        """What the plan says for sampling: branch, forks, history of penalties, tokens to be
        scored, constraints.
        """
        name, start, stop = plan.request_ids[i], int(plan.start[i]), int(plan.stop[i])
        if int(plan.branch[i]) != truth.branch:
            raise Violation(f"{name} is branch {truth.branch}, the plan says {int(plan.branch[i])}")
        if plan.forks.get(i) and (truth.branch or not plan.samples[i] or stop != len(truth.prompt)):
            raise Violation(
                f"{name}: branch {truth.branch} forks at token {stop}, the prompt has"
                f" {len(truth.prompt)}"
            )
        early = plan.samples[i] and int(plan.output_len[i]) < truth.params.min_tokens
        if set(plan.barred.get(i, ())) != (truth.ends if early else set()):
            raise Violation(
                f"{name}: {plan.barred.get(i, ())} are barred after {int(plan.output_len[i])}"
                " output tokens"
            )
        if (i in plan.history) != bool(plan.samples[i] and truth.params.penalized):
            raise Violation(
                f"{name}: history of penalties is {'given' if i in plan.history else 'missing'} at"
                f" token {stop}"
            )
        if i in plan.history:
            given = tuple(part.tolist() for part in plan.history[i])
            if given != (list(truth.prompt), truth.tokens[len(truth.prompt) : stop]):
                raise Violation(
                    f"{name}: history at token {stop} is {given}, should be {truth.tokens[:stop]}"
                )
        expected = truth.constraint if plan.samples[i] else None
        constraint, seen = plan.constrained.get(i, (None, plan.token_ids[:0]))
        if constraint is not expected:
            raise Violation(f"{name}: the constraint is missing, or not its own, at token {stop}")
        if constraint is not None and seen.tolist() != truth.tokens[len(truth.prompt) : stop]:
            raise Violation(f"{name}: at token {stop} the constraint sees {seen.tolist()}")
        given = plan.scored[i].tolist() if i in plan.scored else []
        asked = truth.params.prompt_logprobs is not None and not truth.branch
        if (given and not asked) or given != list(truth.prompt[start + 1 : stop + 1][: len(given)]):
            raise Violation(f"{name}: tokens to be scored from {start + 1} on are {given}")

    def _run_group(
        self, group: int, step: GroupStep, parts: list[Part], plan: StepPlan, traffic: Traffic
    ) -> None:
        law = self.layout.groups[group].group.law
        for part in parts:
            if part.fresh:
                self._read(group, step, part, read_intervals(law, part), traffic)
        for part in parts:
            self._write(group, step, part, plan, traffic)
        for part in parts:
            if not part.fresh:
                if law.reads_before_writing:
                    raise Violation(
                        f"{part.request_id}: group {group} ({law.describe()}) must read before it"
                        " writes"
                    )
                self._read(group, step, part, read_intervals(law, part), traffic)

    def _read(
        self,
        group: int,
        step: GroupStep,
        part: Part,
        intervals: tuple[Interval, ...],
        traffic: Traffic,
    ) -> None:
        table = step.table[step.rows[part.index]].tolist()
        for block, first, last in _pieces(intervals, step.block_tokens):
            unit = table[step.column(block)]
            offset = block * step.block_tokens
            page = self.arena.page(unit)
            found = (
                None
                if page is None or page.group != group
                else page.rows[first - offset : last - offset]
            )
            wanted = part.truth.records[first:last]
            if found != wanted:
                law = self.layout.groups[group].group.law.describe()
                raise Violation(
                    f"{part.request_id} computing [{part.start}, {part.stop}): group {group}"
                    f" ({law}) reads tokens [{first}, {last}) of block {block} at unit {unit}:"
                    f" wanted {wanted}, found {found} (page of group"
                    f" {None if page is None else page.group})"
                )
            self.entries_read += last - first
            traffic.note_read(
                group, unit, part.request_id, (1 << last - offset) - (1 << first - offset)
            )

    def _write(
        self, group: int, step: GroupStep, part: Part, plan: StepPlan, traffic: Traffic
    ) -> None:
        held = self._watch.held(part.request_id, group) if self._watch else None
        for unit, row, position, count in _runs(step, part, int(plan.query_start[part.index])):
            where = (
                f"{part.request_id}: group {group} writes token {position} to unit {unit} row {row}"
            )
            if row != position % step.block_tokens or row + count > step.block_tokens:
                raise Violation(
                    f"{where} and {count - 1} more, should be row {position % step.block_tokens}"
                )
            if row < self._shared.get((group, unit), 0):
                raise Violation(f"{where}, which the prefix index offers to others")
            if held is not None and unit not in held:
                raise Violation(f"{where}, a page that it does not hold")
            first = traffic.note_write(group, unit, part.request_id, (1 << count) - 1 << row)
            if first != part.request_id:
                raise Violation(f"{where}, where {first} writes in the same step")
            self.arena.claim(unit, group).rows[row : row + count] = part.truth.records[
                position : position + count
            ]
            self.entries_written += count

    def _check_traffic(self, plan: StepPlan, traffic: Traffic) -> None:
        """Nobody writes what another group or request reads in this step or in one still in flight.

        Layers of one group read before they write and their slices of a page are their own, so a
        request may turn its ring; any other hand-over inside a step, or before the receipt of the
        reading step, depends on luck.
        """
        sizes = [group.page_units for group in self.layout.groups]
        longest = max(sizes)
        writes = sorted(
            (page, group, *written) for (group, page), written in traffic.writes.items()
        )
        starts = [page for page, *_ in writes]
        for step, other in ((plan.step, traffic), *self._in_flight.items()):
            for (group, page), readers in other.reads.items():
                near = slice(
                    bisect_right(starts, page - longest), bisect_left(starts, page + sizes[group])
                )
                for start, written, name, mask in writes[near]:
                    if start + sizes[written] > page and _conflict(
                        (group, page), readers, (written, start, name, mask)
                    ):
                        raise Violation(
                            f"step {plan.step}: {name} writes group {written} unit {start}, which"
                            f" {sorted(readers)} read as group {group} unit {page} in step {step},"
                            " not yet received"
                        )


def likelihood(truth: Truth, position: int) -> TokenLogprobs:
    """What the fake model says of the token at a position: a function of all tokens up to it."""
    token = truth.token(position)
    return TokenLogprobs(
        token_id=token, logprob=-(truth.records[position][1] % 1024) / 64, rank=1 + token, top=()
    )


def _conflict(
    read: tuple[int, int], readers: dict[str, int], write: tuple[int, int, str, int]
) -> bool:
    """Does the write touch what somebody else read, or the same units seen as another page?"""
    group, page, writer, mask = write
    return read != (group, page) or any(
        rows & mask for name, rows in readers.items() if name != writer
    )


def _runs(step: GroupStep, part: Part, first: int) -> Iterator[tuple[int, int, int, int]]:
    """A part's writes, consecutive rows of a page together: (unit, row, position, how many). first:
    its first token's place.
    """
    own = slice(first, first + part.stop - part.start)
    pages, rows = step.write_page[own], step.write_row[own]
    places = np.flatnonzero(pages >= 0)
    pages, rows = pages[places], rows[places]
    joined = (np.diff(pages) == 0) & (np.diff(rows) == 1) & (np.diff(places) == 1)
    cuts = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(places)] if len(places) else []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        yield int(pages[start]), int(rows[start]), part.start + int(places[start]), stop - start


def _pieces(intervals: tuple[Interval, ...], block_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Intervals cut at block borders: (block, first token, last token + 1)."""
    for start, stop in intervals:
        for block in block_range((start, stop), block_tokens):
            yield block, max(start, block * block_tokens), min(stop, (block + 1) * block_tokens)
