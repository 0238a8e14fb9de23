"""The loop around scheduler and runner: requests in, token events out.

Owns the order of one step (schedule, execute, commit) and who has seen which token. Knows no text, no clock, no threads: a
caller decides when to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.base import OctavoError
from octavo.sched.request import FinishReason, Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult


class Executor(Protocol):
    """What the core asks of a runner."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and return its receipt."""


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """New tokens of one request in one step; ``finish_reason`` is set with its last event."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class EngineCore:
    """One scheduler and one runner."""

    def __init__(self, scheduler: Scheduler, runner: Executor) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._seen: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises ConfigError for an id in use, CapacityError for one that can never fit."""
        self.scheduler.add(request)
        self._seen[request.request_id] = 0

    def abort(self, request_id: str) -> bool:
        """End a request now; False where it is not known. It gets no further event."""
        self._seen.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Compute once. The scheduler promises that work can always go on; OctavoError where it breaks that."""
        plan = self.scheduler.schedule()
        if plan is None:
            if self.has_work:
                raise OctavoError(
                    "the scheduler has work but planned none of it; please report this with the arguments of the engine"
                )
            return []
        changed = self.scheduler.commit(self._runner.execute(plan))
        return [self._event(request) for request in changed if request.request_id in self._seen]

    def _event(self, request: Request) -> TokenEvent:
        seen = self._seen[request.request_id]
        new = tuple(request.output_token_ids[seen:])
        if request.finished:
            del self._seen[request.request_id]
        else:
            self._seen[request.request_id] = seen + len(new)
        return TokenEvent(request_id=request.request_id, token_ids=new, finish_reason=request.finish_reason)
