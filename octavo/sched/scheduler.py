"""Continuous batching: which requests compute which tokens next.

Owns the queues, the token budget, preemption and the making of ``StepPlan``. Knows no clock, no
tensors and no I/O; asks the cache only through ``KVCacheManager``.

Running requests go first, in order of priority and arrival, so the first of them always makes
progress: when pages run out, the last one gives its pages up and starts again later (recompute),
usually from its own cached prefix. A request that could never be served alone is refused when it is
added, so nothing here can deadlock.

Several steps may be planned before the first receipt arrives; they are carried out and received in
order. A request whose next token is being sampled waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from octavo.base import CapacityError, ConfigError, Handling, note_handled
from octavo.cache.index.policy import DEFAULT_POLICY
from octavo.cache.layout import CacheLayout, longest_request
from octavo.cache.manager import Admission, KVCacheManager, Lookup
from octavo.cache.report import HitExplanation, MissCause
from octavo.sched.lanes import Crew, Lanes
from octavo.sched.request import FinishReason, Request, RequestState, branch_id
from octavo.sched.step import StepPlan, StepResult, TokenLogprobs
from octavo.sched.structured import Constraint

MAX_EXPLANATIONS = 1024
"""Requests, ended ones too, whose prefix hit can still be explained."""

MAX_WAIT_STEPS = 16
"""Steps a request waits for a prefix that a step in flight has promised, before it computes the
prefix itself.
"""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """What a scheduler is made with, beside the layout; the same options make the same scheduler.

    max_num_batched_tokens: tokens of one step, over all requests. max_num_seqs: requests running at
        once. max_model_len: tokens of one request; None is the layout's limit. The others are those
        of ``KVCacheManager``.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    hash_seed: int = 0
    model_digest: bytes = b""
    checkpoint_interval: int | None = None
    eviction: str = DEFAULT_POLICY

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1 or self.max_num_seqs < 1:
            raise ConfigError("max_num_batched_tokens and max_num_seqs must be at least 1")


class _Queued:
    """A request with its place in line (higher priority first, then arrival) and its table row
    while it runs.
    """

    __slots__ = ("arrival", "cold", "place", "request", "row", "waited")

    def __init__(self, request: Request, arrival: int) -> None:
        self.request, self.arrival = request, arrival
        self.place = (-request.priority, arrival, request.branch)
        # What is found in the cache cannot be scored.
        self.waited, self.cold, self.row = 0, request.to_score > 0, -1

    def __lt__(self, other: _Queued) -> bool:
        return self.place < other.place


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Tokens ``[start, stop)`` of a request in a step."""

    queued: _Queued
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """What a step computes: tokens ``[start[i], stop[i])`` of ``queued[i]`` in row ``rows[i]``. All
    arrays int64 [R]. ``stay``: as in ``Lanes``, when the step was planned.
    """

    queued: Sequence[_Queued]
    rows: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    stay: np.ndarray


def _special(parts: _Parts) -> dict[str, Any]:
    """What a plan says of the few requests whose sampling depends on what came before: fields of
    ``StepPlan``.
    """
    forks: dict[int, tuple[str, ...]] = {}
    history: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    barred: dict[int, tuple[int, ...]] = {}
    scored: dict[int, np.ndarray] = {}
    constrained: dict[int, tuple[Constraint, np.ndarray]] = {}
    starts, stops = parts.start.tolist(), parts.stop.tolist()
    for index, queued in enumerate(parts.queued):
        request, prompt = queued.request, len(queued.request.prompt_token_ids)
        if request.plain:
            continue
        last = min(stops[index] + 1, prompt)
        if request.to_score and last - 1 > len(request.scored):
            scored[index] = request.token_ids(starts[index] + 1, last)
        if stops[index] < request.num_tokens:
            continue
        if not request.branch and not request.output_token_ids and request.params.n > 1:
            forks[index] = tuple(
                branch_id(request.request_id, branch) for branch in range(1, request.params.n)
            )
        if request.params.penalized:
            history[index] = (
                request.token_ids(0, prompt),
                request.token_ids(prompt, request.num_tokens),
            )
        if request.barred:
            barred[index] = request.barred
        if request.constraint is not None:
            output = request.token_ids(prompt, request.num_tokens)
            constrained[index] = (request.constraint, output)
    return {
        "forks": forks,
        "history": history,
        "barred": barred,
        "scored": scored,
        "constrained": constrained,
    }


def _score(request: Request, start: int, scores: Sequence[TokenLogprobs]) -> None:
    """Add the logprobs of tokens from ``start + 1`` on; a prompt computed again brings some for a
    second time.
    """
    known = request.scored
    known += scores[len(known) - start :]


class Scheduler:
    """One per engine at a time.

    options: or the fields of ``SchedulerOptions`` by name. max_model_len: most tokens of one
    request, by the model and by what an otherwise empty arena holds.
    """

    def __init__(
        self, layout: CacheLayout, options: SchedulerOptions | None = None, **given: Any
    ) -> None:
        self.layout = layout
        assert options is None or not given, "options come as one object or by name"
        self.options = options = options or SchedulerOptions(**given)
        self.max_num_batched_tokens = options.max_num_batched_tokens
        self.max_num_seqs = options.max_num_seqs
        self._own_limit = min(options.max_model_len or layout.max_model_len, layout.max_model_len)
        # What a request can really have; how many others there are has no part in it.
        self.max_model_len = longest_request(layout, self._own_limit)
        self.cache = KVCacheManager(
            layout,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=options.enable_prefix_caching,
            hash_seed=options.hash_seed,
            model_digest=options.model_digest,
            checkpoint_interval=options.checkpoint_interval,
            eviction=options.eviction,
        )
        self._arrivals, self._steps = count(), count()
        self._requests: dict[str, _Queued] = {}
        self._waiting: list[_Queued] = []
        self._running: list[_Queued] = []
        self._lanes = Lanes(options.max_num_seqs)
        self._in_flight: list[tuple[StepPlan, _Parts]] = []
        self._explanations: dict[str, HitExplanation] = {}
        self.num_preemptions = 0

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ConfigError or CapacityError, and keeps nothing, where it could
        never be served.
        """
        if request.request_id in self._requests:
            raise ConfigError(f"request id {request.request_id!r} is in use")
        if "#" in request.request_id:
            raise ConfigError(
                f"request id {request.request_id!r} must not contain '#', which names continuations"
            )
        self._check_length(request)
        queued = self._requests[request.request_id] = _Queued(request, next(self._arrivals))
        insort(self._waiting, queued)

    def restore(self, requests: Sequence[Request]) -> None:
        """Queue requests that another scheduler accepted and did not finish, in order of arrival,
        with the tokens that they have; continuations of one prompt stand together.
        """
        arrivals: dict[str, int] = {}
        for request in requests:
            root = request.request_id.partition("#")[0]
            if root not in arrivals:
                arrivals[root] = next(self._arrivals)
            assert request.state is RequestState.WAITING
            assert request.request_id not in self._requests
            queued = self._requests[request.request_id] = _Queued(request, arrivals[root])
            insort(self._waiting, queued)

    def successor(self, requests: Sequence[Request]) -> Scheduler:
        """A scheduler with an empty cache over the same arena, in which ``requests`` wait: what is
        left to do where this one broke. No queue and no page of this one is looked at.

        Its steps are numbered on, so that a receipt of this one is none of its own.
        """
        made = Scheduler(self.layout, self.options)
        made.max_num_batched_tokens = self.max_num_batched_tokens
        made.max_num_seqs = self.max_num_seqs
        made._steps, made._explanations = self._steps, self._explanations
        made.num_preemptions = self.num_preemptions
        made.restore(requests)
        return made

    def _check_length(self, request: Request) -> None:
        """Raise where a prompt leaves no room for the least output that it asks for. More than
        there is room for may be asked for: then the output ends at ``max_model_len``.
        """
        known, params = request.num_tokens, request.params
        least = 1 if params.max_tokens is None else min(1, params.max_tokens)
        if known + least > self.max_model_len:
            if known + least <= self._own_limit:
                self.cache.check_capacity(known + least)
            raise CapacityError(
                f"request {request.request_id}: a prompt of {known:,} tokens leaves no room for"
                f" output in max_model_len {self._own_limit:,}; at most"
                f" {self.max_model_len - least:,} tokens of prompt fit"
            )
        room = self.max_model_len - known
        if params.min_tokens > room:
            raise CapacityError(
                f"min_tokens {params.min_tokens:,} cannot be had: a prompt of {known:,} tokens"
                f" leaves room for {room:,}"
            )

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it is. False where it is unknown or has ended."""
        if (queued := self._requests.get(request_id)) is None:
            return False
        self._finish(queued, FinishReason.ABORT)
        return True

    @property
    def has_work(self) -> bool:
        """Is any request unfinished, or any step unreceived?"""
        return bool(self._requests or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Unfinished requests: running ones in the order in which they are served, then waiting
        ones.
        """
        return tuple(queued.request for queued in (*self._running, *self._waiting))

    @property
    def explanations(self) -> dict[str, HitExplanation]:
        """Hit explanations by request id, ended requests' too, oldest first."""
        return dict(self._explanations)

    def explain(self, request_id: str) -> HitExplanation | None:
        """Why a request's prefix hit was what it was when it was first admitted; None before that,
        and long after.
        """
        return self._explanations.get(request_id)

    # -- planning ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None where nothing can run before another receipt (or at all)."""
        step = next(self._steps)
        parts = self._continue_running(step, self.max_num_batched_tokens)
        budget = self.max_num_batched_tokens - int((parts.stop - parts.start).sum())
        if self._waiting and (more := self._start_waiting(step, budget, bool(len(parts.rows)))):
            parts = self._join(parts, more)
        return self._plan(step, parts) if len(parts.rows) else None

    def _join(self, parts: _Parts, more: Sequence[_Part]) -> _Parts:
        rows = np.array([part.queued.row for part in more], np.int64)
        return _Parts(
            queued=[*parts.queued, *(part.queued for part in more)],
            rows=np.concatenate([parts.rows, rows]),
            start=np.append(parts.start, np.array([part.start for part in more], np.int64)),
            stop=np.append(parts.stop, np.array([part.stop for part in more], np.int64)),
            stay=np.concatenate([parts.stay, self._lanes.stay[rows]]),
        )

    def _crew(self) -> Crew:
        return self._lanes.crew([(queued.row, queued.request) for queued in self._running])

    def _continue_running(self, step: int, budget: int) -> _Parts:
        """The next tokens of running requests. Single tokens of all of them, which is nearly every
        step, are planned together.
        """
        rows = self._crew().rows
        start = self.cache.scheduled_tokens(rows)
        left = self._lanes.known[rows] - start
        planned = np.zeros(len(rows), bool)
        if left.max(initial=0) <= 1 and len(rows) <= budget:
            single = left == 1
            # Nothing is left of the others while their next token is being sampled.
            at = slice(None) if single.all() else single.nonzero()[0]
            planned[at] = self.cache.decode(rows[at], step)
            if np.array_equal(planned, single):
                running = (
                    self._running
                    if isinstance(at, slice)
                    else [self._running[index] for index in at.tolist()]
                )
                rows, start = rows[at], start[at]
                return _Parts(
                    queued=list(running),
                    rows=rows,
                    start=start,
                    stop=start + 1,
                    stay=self._lanes.stay[rows],
                )
            return self._continue_each(step, budget, rows, start, left, planned, asked=len(rows))
        return self._continue_each(step, budget, rows, start, left, planned, asked=0)

    def _continue_each(
        self,
        step: int,
        budget: int,
        rows: np.ndarray,
        starts: np.ndarray,
        left: np.ndarray,
        planned: np.ndarray,
        *,
        asked: int,
    ) -> _Parts:
        """One running request after another. planned: bool [R], those whose single token has been
        planned, of the first ``asked``.
        """
        running, parts = list(self._running), []
        for index, (queued, start, rest) in enumerate(
            zip(running, starts.tolist(), left.tolist(), strict=True)
        ):
            # Nothing is left while the next token is being sampled; a request further back may just
            # have been preempted.
            if not rest or not budget or queued.request.state is not RequestState.RUNNING:
                continue
            if rest == 1 and index >= asked:
                # Single tokens are planned together, up to the next part of a prompt: nobody takes
                # pages out of turn.
                parts_behind = np.flatnonzero(left[index : len(self._running)] > 1)
                asked = index + int(parts_behind[0]) if len(parts_behind) else len(self._running)
                single = index + np.flatnonzero(left[index:asked] == 1)[:budget]
                planned[single] = self.cache.decode(rows[single], step)
            stop = start + min(rest, budget)
            if not planned[index]:
                with Handling(queued.request.request_id):
                    if not self._make_room(queued, stop, step):
                        continue
            parts.append(_Part(queued=queued, start=start, stop=stop))
            budget -= stop - start
        none = np.zeros(0, np.int64)
        return self._join(_Parts(queued=(), rows=none, start=none, stop=none, stay=none), parts)

    def _make_room(self, queued: _Queued, stop: int, step: int) -> bool:
        """Extend a running request, preempting those behind it if it must be. False where it has to
        sit this step out.
        """
        request = queued.request
        while not (
            self.cache.extend(request, stop, step)
            or self.cache.extend(request, stop, step, checkpoints=False)
        ):
            if self._in_flight or self.cache.coordinator.in_flight:
                return False
            if self._running[-1] is queued:
                self._preempt(queued, cold=len(self._running) == 1)
                return False
            self._preempt(self._running[-1])
        return True

    def _preempt(self, queued: _Queued, *, cold: bool = False, publish: bool = True) -> None:
        """Take a request's pages; it will start again, from its own cached prefix unless
        ``cold``.
        """
        with Handling(queued.request.request_id):
            self._running.remove(queued)
            self.cache.free(queued.request, in_flight=self._is_in_flight(queued), publish=publish)
            self._lanes.leave(queued.row)
        queued.request.state = RequestState.WAITING
        queued.cold = cold or queued.request.to_score > 0
        queued.request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, queued)

    def _start_waiting(self, step: int, budget: int, busy: bool) -> list[_Part]:
        """First tokens of waiting requests. busy: the step has parts already."""
        parts: list[_Part] = []
        for queued in list(self._waiting):
            if not budget or len(self._running) >= self.max_num_seqs:
                break
            with Handling(queued.request.request_id):
                found = self.cache.lookup(queued.request)
                patient = not queued.cold and queued.waited < MAX_WAIT_STEPS
                others = busy or parts or self._in_flight or self._running
                if found.promised and patient and others:
                    queued.waited += 1
                    continue
                part = self._start(queued, found, step, budget)
            if part is None:
                break
            parts.append(part)
            budget -= part.stop - part.start
        return parts

    def _start(self, queued: _Queued, found: Lookup, step: int, budget: int) -> _Part | None:
        """Admit a waiting request and plan its first tokens; None, and nothing changed, where it
        does not fit now.
        """
        request, alone = queued.request, not self._running and not self._in_flight
        explanation = self.cache.explain(request, found)
        for cold in (False, True) if alone and not queued.cold else (queued.cold,):
            admission = self.cache.can_admit(request, found, cold=cold)
            if isinstance(admission, Admission):
                self.cache.admit(admission)
                start = self.cache.scheduled(request)
                stop = min(request.num_tokens, start + budget)
                if self.cache.extend(request, stop, step) or self.cache.extend(
                    request, stop, step, checkpoints=False
                ):
                    break
                self.cache.free(request, publish=False)
        else:
            assert not alone or self.cache.coordinator.in_flight, "what was not refused fits alone"
            return None
        self._waiting.remove(queued)
        insort(self._running, queued)
        request.state, queued.row = RequestState.RUNNING, self.cache.row(request)
        self._lanes.enter(queued.row, request)
        if not request.num_preemptions:
            request.num_cached_tokens = start
            if cold:
                why = "the whole prompt had to be computed"
                explanation = replace(explanation, hit_tokens=0, cause=MissCause.OFF, reason=why)
            self._explanations[request.request_id] = explanation
            if len(self._explanations) > MAX_EXPLANATIONS:
                del self._explanations[next(iter(self._explanations))]
        return _Part(queued=queued, start=start, stop=stop)

    def _plan(self, step: int, parts: _Parts) -> StepPlan:
        rows, start, stop = parts.rows, parts.start, parts.stop
        known, crew = self._lanes.known[rows], self._crew()
        lengths = stop - start
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        groups, copies = self.cache.take_step(rows, start, query_start)
        if query_start[-1] == len(rows):
            ends = stop == known
            token_ids = self._lanes.last[rows]
            if not ends.all():
                # Of a prompt that is computed token by token, the last token is another one.
                for index in np.flatnonzero(~ends).tolist():
                    request, at = parts.queued[index].request, int(start[index])
                    token_ids[index] = request.token_ids(at, at + 1)[0]
        else:
            token_ids = np.concatenate(
                [
                    queued.request.token_ids(first, last)
                    for queued, first, last in zip(
                        parts.queued, start.tolist(), stop.tolist(), strict=True
                    )
                ]
            )
        whole = len(rows) == len(crew.rows) and np.array_equal(rows, crew.rows)
        requests = [queued.request for queued in parts.queued] if not whole else ()
        plan = StepPlan(
            step=step,
            request_ids=crew.ids if whole else tuple(one.request_id for one in requests),
            token_ids=token_ids,
            query_start=query_start,
            start=start.astype(np.int32),
            stop=stop.astype(np.int32),
            samples=stop == known,
            sampling=crew.sampling if whole else tuple(one.params for one in requests),
            output_len=(known - self._lanes.prompt[rows]).astype(np.int32),
            branch=crew.branch if whole else np.array([one.branch for one in requests], np.int32),
            groups=groups,
            copies=copies,
            **({} if crew.plain else _special(parts)),
        )
        self._in_flight.append((plan, parts))
        return plan

    def _is_in_flight(self, queued: _Queued) -> bool:
        row = queued.row
        return any(
            bool(((parts.rows == row) & (parts.stay == self._lanes.stay[row])).any())
            for _, parts in self._in_flight
        )

    # -- receipts ----------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Request]:
        """Take a step's receipt; returns the requests that got a token or ended. Receipts come in
        order of their plans.
        """
        if not self._in_flight or self._in_flight[0][0].step != result.step:
            raise ConfigError(f"step {result.step} is not the next one to be received")
        plan, parts = self._in_flight.pop(0)
        if result.failed:
            self._fail(plan, parts)
            return []
        ended = self._end_invalid(plan, parts, result.invalid) if result.invalid else []
        # Void is what belongs to a request that has lost its pages or ended since.
        valid = self._lanes.stay[parts.rows] == parts.stay
        every = bool(valid.all())
        rows, stop = (parts.rows, parts.stop) if every else (parts.rows[valid], parts.stop[valid])
        self.cache.commit(rows, stop)
        for index in [index for index in plan.scored if valid[index]]:
            with Handling(plan.request_ids[index]):
                scores = result.scored[plan.request_ids[index]]
                _score(parts.queued[index].request, int(parts.start[index]), scores)
        changed = self._sampled(plan, parts, valid & plan.samples)
        tokens = [result.tokens[queued.request.request_id] for queued in changed]
        grown = np.array([queued.row for queued in changed], np.int64)
        placed = grown >= 0
        self._lanes.append(grown[placed], np.array(tokens, np.int32)[placed])
        for queued, token in zip(changed, tokens, strict=True):
            # Of every request in every step: a block of ``Handling`` would cost more than this.
            try:
                self._accept(queued, token, result)
            except BaseException as error:
                note_handled(error, queued.request.request_id)
                raise
        self.cache.receive(result.step)
        return [queued.request for queued in (*ended, *changed)]

    def _sampled(self, plan: StepPlan, parts: _Parts, samples: np.ndarray) -> list[_Queued]:
        """Requests that have got a token, those that fork from them included."""
        if samples.all() and not plan.forks:
            return list(parts.queued)
        changed: list[_Queued] = []
        for index in np.flatnonzero(samples).tolist():
            changed.append(queued := parts.queued[index])
            for branch in range(1, len(plan.forks.get(index, ())) + 1):
                with Handling(queued.request.request_id):
                    changed.append(self._fork(queued, branch))
        return changed

    def _end_invalid(self, plan: StepPlan, parts: _Parts, invalid: frozenset[str]) -> list[_Queued]:
        """End requests whose numbers are none, and forget what is cached: nobody can say since when
        the numbers were wrong.
        """
        valid = self._lanes.stay[parts.rows] == parts.stay
        ended = [
            queued
            for name, queued, counts in zip(
                plan.request_ids, parts.queued, valid.tolist(), strict=True
            )
            if counts and name in invalid
        ]
        for queued in ended:
            self._finish(queued, FinishReason.ERROR, publish=False)
        self.cache.clear_prefixes()
        return ended

    def _fork(self, source: _Queued, branch: int) -> _Queued:
        """Another continuation, on its source's pages; it waits like any other request where there
        is no row for it.
        """
        request = source.request.fork(branch)
        queued = self._requests[request.request_id] = _Queued(request, source.arrival)
        if self.cache.fork(source.request, request):
            request.state, queued.row = RequestState.RUNNING, self.cache.row(request)
            self._lanes.enter(queued.row, request)
            insort(self._running, queued)
        else:
            insort(self._waiting, queued)
        return queued

    def _accept(self, queued: _Queued, token: int, result: StepResult) -> None:
        request = queued.request
        if request.params.max_tokens == 0:
            # The prompt was all that was asked for; what was sampled behind it says nothing.
            self._finish(queued, FinishReason.LENGTH)
            return
        request.append(token)
        if request.params.logprobs is not None:
            request.logprobs.append(result.logprobs[request.request_id])
        known = request.num_tokens
        if token in request.ends and known > request.least_tokens:
            self._finish(queued, FinishReason.STOP)
        elif known >= request.most_tokens or known >= self.max_model_len:
            self._finish(queued, FinishReason.LENGTH)

    def _finish(self, queued: _Queued, reason: FinishReason, *, publish: bool = True) -> None:
        request = queued.request
        if self.cache.running(request):
            self._running.remove(queued)
            in_flight = self._is_in_flight(queued)
            self.cache.free(request, in_flight=in_flight, publish=publish)
            self._lanes.leave(queued.row)
        else:
            self._waiting.remove(queued)
        del self._requests[request.request_id]
        request.state, request.finish_reason = RequestState.FINISHED, reason

    def _fail(self, plan: StepPlan, parts: _Parts) -> None:
        """A step went wrong: nothing it wrote can be trusted, so its requests start again; nor can
        pages it was to copy.
        """
        valid = self._lanes.stay[parts.rows] == parts.stay
        lost = [parts.queued[index] for index in np.flatnonzero(valid).tolist()]
        for queued in list(self._running) if plan.copies else lost:
            self._preempt(queued, publish=False)
        if plan.copies:
            self.cache.clear_prefixes()
        self.cache.receive(plan.step)

    def check(self) -> None:
        """Assert the invariants of queues, cache and pool, from scratch."""
        assert self._waiting == sorted(self._waiting) and self._running == sorted(self._running)
        assert len(self._requests) == len(self._waiting) + len(self._running)
        assert all(self.cache.running(queued.request) for queued in self._running)
        self._lanes.check([(queued.row, queued.request) for queued in self._running])
        self.cache.check()
