"""The loop around scheduler and runner: requests in, token events out.

Owns the order of one step (schedule, execute, commit), what becomes of requests whose step crashed,
and which continuations
belong to one request. Knows no text, no clock, no threads: a caller decides when to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.base import OctavoError
from octavo.sched.request import FinishReason, Request, branch_id
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepPlan, StepResult, TokenLogprobs


class Executor(Protocol):
    """What the core asks of a runner."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and return its receipt."""


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """What one step brought to one continuation of a request. ``finish_reason`` is set with its
    last event.

    logprobs: of the tokens, where asked for. error: the step that computed the request crashed;
    none of its continuations gets another event.
    """

    request_id: str
    branch: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None


class EngineCore:
    """One scheduler and one runner."""

    def __init__(self, scheduler: Scheduler, runner: Executor) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._open: dict[str, set[int]] = {}

    @property
    def has_work(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises ConfigError for an id in use, CapacityError for one that can
        never fit.
        """
        self.scheduler.add(request)
        self._open[request.request_id] = set(range(request.params.n))

    def abort(self, request_id: str, branch: int | None = None) -> bool:
        """End a request, or one continuation of it, now; False where it is not known. It gets no
        further event.
        """
        branches = (
            {branch} & self._open.get(request_id, set())
            if branch is not None
            else self._open.get(request_id, set())
        )
        for one in sorted(branches):
            self.scheduler.abort(branch_id(request_id, one))
            self._close(request_id, one)
        return bool(branches)

    def step(self) -> list[TokenEvent]:
        """Compute once. A crash of the runner ends the requests of its step with an ``error``
        event, and nothing else.

        Raises OctavoError where the scheduler has work and plans none of it, which it promises not
        to do.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            if self.has_work:
                raise OctavoError(
                    "the scheduler has work but planned none of it; please report this with the"
                    " arguments of the engine"
                )
            return []
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            return self._crashed(plan, error)
        except BaseException:
            self._crashed(plan, None)
            raise
        changed = self.scheduler.commit(result)
        return [
            self._event(request)
            for request in changed
            if request.branch in self._open.get(_root(request), ())
        ]

    def _crashed(self, plan: StepPlan, error: Exception | None) -> list[TokenEvent]:
        """Nothing a crashed step wrote is trusted: requests beside it start again, its own end
        here.
        """
        self.scheduler.commit(StepResult(step=plan.step, tokens={}, failed=True))
        lost = dict.fromkeys(request_id.partition("#")[0] for request_id in plan.request_ids)
        return [
            TokenEvent(request_id=root, error=error)
            for root in lost
            if error is not None and self.abort(root)
        ]

    def _event(self, request: Request) -> TokenEvent:
        if request.finished:
            self._close(_root(request), request.branch)
        return TokenEvent(
            request_id=_root(request),
            branch=request.branch,
            token_ids=(request.output_token_ids[-1],),
            logprobs=tuple(request.logprobs[-1:]),
            finish_reason=request.finish_reason,
        )

    def _close(self, request_id: str, branch: int) -> None:
        self._open[request_id] = self._open[request_id] - {branch}
        if not self._open[request_id]:
            del self._open[request_id]


def _root(request: Request) -> str:
    """The id that all continuations of a request share."""
    return request.request_id.partition("#")[0]
