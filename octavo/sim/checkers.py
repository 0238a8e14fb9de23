"""What must hold after every step and at the end of every request.

Owns the expected output of a request, the peak bound, and the probes of the cache. Knows the truth
about each request, the scheduler and the cache under it; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.base import NO_PAGE
from octavo.cache.layout import request_pages
from octavo.sched.request import FinishReason, Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import TokenLogprobs
from octavo.sim.fake import Place, Truth, Violation, likelihood


def expected_end(
    request: Request, truth: Truth, *, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """Output and reason of a request that nobody aborts."""
    params = request.params
    stops = set(params.stop_token_ids) | (
        set() if params.ignore_eos else set(request.eos_token_ids)
    )
    room = max_model_len - len(request.prompt_token_ids)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    output = truth.output(limit)
    for length, token in enumerate(output, 1):
        if token in stops and length > params.min_tokens:
            return output[:length], FinishReason.STOP
    return output, FinishReason.LENGTH


def check_output(request: Request, truth: Truth) -> None:
    """What a request has generated so far is the beginning of what it would generate alone, without
    any cache.
    """
    output, prompt = request.output_token_ids, len(request.prompt_token_ids)
    if list(output) != truth.output(len(output)):
        raise Violation(
            f"{request.request_id}: output {list(output)} should be {truth.output(len(output))}"
        )
    if request.params.logprobs is not None:
        _check_logprobs(
            request.request_id, request.logprobs, truth, range(prompt, prompt + len(output))
        )
    if request.params.prompt_logprobs is not None and output and not request.branch:
        _check_logprobs(request.request_id, request.scored, truth, range(1, prompt))


def _check_logprobs(
    name: str, found: Sequence[TokenLogprobs], truth: Truth, positions: range
) -> None:
    if list(found) != [likelihood(truth, position) for position in positions]:
        raise Violation(
            f"{name}: {len(found)} logprobs of tokens {positions.start} to {positions.stop} are not"
            " theirs"
        )


def check_finished(request: Request, truth: Truth, *, max_model_len: int, aborted: bool) -> None:
    """A request ended as it would have alone; an aborted one ended before that."""
    check_output(request, truth)
    output, reason = expected_end(request, truth, max_model_len=max_model_len)
    name, found = request.request_id, request.finish_reason
    if not request.finished:
        raise Violation(f"{name} is reported finished in state {request.state}")
    if aborted:
        if found is not FinishReason.ABORT or len(request.output_token_ids) > len(output):
            raise Violation(
                f"{name} was aborted, ended as {found} after {len(request.output_token_ids)} of"
                f" {len(output)} tokens"
            )
    elif (len(request.output_token_ids), found) != (len(output), reason):
        raise Violation(
            f"{name} ended as {found} after {len(request.output_token_ids)} tokens, should be"
            f" {reason} after {len(output)}"
        )


class CacheWatch:
    """What the cache says may not be written, and who holds what. The runner asks it right after a
    plan was made.
    """

    def __init__(self, scheduler: Scheduler, live: dict[str, Request]) -> None:
        self._scheduler = scheduler
        self._live = live

    def shared_rows(self) -> dict[Place, int]:
        """Leading rows of every indexed page that hold the tokens of its last node, or of a rolling
        checkpoint.
        """
        coordinator = self._scheduler.cache.coordinator
        index, unit = coordinator.index, coordinator.layout.hash_unit
        shared: dict[Place, int] = {}
        for group, (layout, grain) in enumerate(
            zip(coordinator.layout.groups, coordinator.grains, strict=True)
        ):
            for position, lane in enumerate(grain.lanes):
                skipped = grain.per_unit - len(grain.lanes)
                nodes = np.flatnonzero(index.pages[lane] != NO_PAGE)
                stop = (index.depth(nodes) - 1) * unit + (skipped + position + 1) * grain.tokens
                rows = (stop - 1) % layout.block_tokens + 1
                for page, count in zip(
                    index.pages[lane, nodes].tolist(), rows.tolist(), strict=True
                ):
                    shared[group, page] = max(count, shared.get((group, page), 0))
        for row in np.flatnonzero(coordinator.rolling.kept_at).tolist():
            self._add_kept(shared, row, int(coordinator.rolling.kept_at[row]))
        return shared

    def _add_kept(self, shared: dict[Place, int], row: int, mark: int) -> None:
        """Rows that a running request's rolling checkpoint will offer."""
        coordinator = self._scheduler.cache.coordinator
        for group in coordinator.rolling_groups.tolist():
            size = coordinator.layout.groups[group].block_tokens
            blocks, pages = coordinator.kept_pages(row, group)
            for block, page in zip(blocks.tolist(), pages.tolist(), strict=True):
                count = min(size, mark - block * size)
                shared[group, page] = max(count, shared.get((group, page), 0))

    def held(self, request_id: str, group: int) -> frozenset[int]:
        """Pages that a running request has references on in one group, checkpoints' included."""
        cache = self._scheduler.cache
        row = cache.row(self._live[request_id])
        return frozenset(cache.coordinator.referred_pages(row, group).tolist())


def check_peak(scheduler: Scheduler, request: Request) -> None:
    """A request holds what its laws can need, one block per group, and what its own checkpoints in
    flight keep.

    Groups that never let go may share pages of known tokens that the bounded groups have yet to
    compute again.
    """
    cache = scheduler.cache
    if not cache.running(request):
        return
    row = cache.row(request)
    computed = request_pages(cache.layout, cache.scheduled(request))
    known = request_pages(cache.layout, request.num_tokens)
    for index, group in enumerate(cache.coordinator.groups):
        most = known[index] if group.law.prefix is None else computed[index]
        marks = cache.coordinator.promised(row) if group.law.prefix is not None else ()
        kept = sum(len(group.blocks_needed(mark)) for mark in marks)
        held = cache.coordinator.num_held(row, index)
        if held > most + 1 + kept:
            raise Violation(
                f"{request.request_id} at {cache.scheduled(request)} tokens holds {held} pages of"
                f" group {index} ({group.law.describe()}): needs {most} and 1, checkpoints keep"
                f" {kept}"
            )
