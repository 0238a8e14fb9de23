"""The loop around scheduler and runner: requests in, token events out.

Owns the order of one step (schedule, execute, commit), which continuations belong to one request,
and what becomes of requests when something breaks. Knows no text and no threads: a caller decides
when to step.

Two things may break. A *runner* that crashes ends the requests of its step. A *scheduler* that
breaks, cache included, ends the request that was being handled, where one can be named; all others
go on in a new scheduler with an empty cache over the same arena, with the tokens that their clients
have got. What they draw next depends on the place of the token only, so their outputs are what they
would have been. One step at a time is computed, and its receipt is dropped before a page is given
out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.base import CapacityError, ConfigError, OctavoError, handled, note_handled
from octavo.engine.errors import (
    EngineDeadError,
    InvalidNumbersError,
    RequestFailedError,
    StepFailedError,
)
from octavo.engine.record import OpenRequest, Recorder
from octavo.engine.recovery import Recovery
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

    logprobs: of the tokens, where asked for. error: something went wrong with the request; none of
    its continuations gets another event.
    """

    request_id: str
    branch: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: OctavoError | None = None


class EngineCore:
    """One runner, and one scheduler at a time. recovery: what is done beside making a new one."""

    def __init__(
        self, scheduler: Scheduler, runner: Executor, *, recovery: Recovery | None = None
    ) -> None:
        self.scheduler, self.recovery = scheduler, recovery or Recovery()
        self._runner = runner
        self._open: dict[str, OpenRequest] = {}
        self._recorder = self._record()
        # Events of a recovery between two steps.
        self._late: list[TokenEvent] = []
        self._dead: EngineDeadError | None = None

    @property
    def has_work(self) -> bool:
        """True while any request waits or runs, or something is to be said of one."""
        return bool(self._late or self.scheduler.has_work)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ConfigError for an id in use, CapacityError for one that can
        never fit, RequestFailedError where the scheduler broke over it.
        """
        self._refuse_where_dead()
        opened = OpenRequest(
            requests={0: request}, delivered=dict.fromkeys(range(request.params.n), 0)
        )
        try:
            self.scheduler.add(request)
        except (ConfigError, CapacityError):
            raise
        except Exception as error:
            # So that the dump has it; it has never been open for anybody else.
            self._recorder.add(opened)
            note_handled(error, request.request_id)
            self._recover(error)
            raise _failed(error) from error
        except BaseException:
            self._renew()
            raise
        self._open[request.request_id] = opened
        self._recorder.add(opened)

    def abort(self, request_id: str, branch: int | None = None) -> bool:
        """End a request, or one continuation of it, now; False where it is not known. It gets no
        further event.
        """
        opened = self._open.get(request_id)
        branches = [] if opened is None else sorted(opened.delivered)
        if branch is not None:
            branches = [one for one in branches if one == branch]
        for one in branches:
            self._recorder.abort(request_id, one)
            # Whatever happens now, it happens to nobody: this one was to end.
            self._close(request_id, one)
            try:
                self.scheduler.abort(branch_id(request_id, one))
            except Exception as error:
                note_handled(error, request_id)
                self._recover(error, blame=False)
            except BaseException:
                self._renew()
                raise
        return bool(branches)

    def step(self) -> list[TokenEvent]:
        """Compute once. A crash of the runner ends the requests of its step with an ``error``
        event, and nothing else; one of the scheduler ends the request it was about.

        Raises EngineDeadError where the scheduler breaks too often, and from then on.
        """
        self._refuse_where_dead()
        return self._step() + self._take_late()

    def _step(self) -> list[TokenEvent]:
        if not self.scheduler.has_work:
            return []
        try:
            self._recorder.schedule()
            plan = self.scheduler.schedule()
            if plan is None:
                raise OctavoError("the scheduler has work but planned none of it")
        except Exception as error:
            self._recover(error)
            return []
        except BaseException:
            self._renew()
            raise
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            self._crashed(plan, error)
            return []
        except BaseException:
            self._crashed(plan, None)
            raise
        return self._commit(plan, result)

    def _commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        try:
            self._recorder.commit(plan, result)
            changed = self.scheduler.commit(result)
        except Exception as error:
            # The receipt is dropped: its tokens are drawn again.
            self._recover(error)
            return []
        except BaseException:
            self._renew()
            raise
        self._recorder.committed()
        for index in plan.scored:
            if (opened := self._open.get(plan.request_ids[index])) is not None:
                opened.scored = len(opened.request.scored)
        events, invalid = [], []
        for request in changed:
            root = request.request_id.partition("#")[0]
            opened = self._open.get(root)
            if opened is None or request.branch not in opened.delivered:
                continue
            if request.finish_reason is FinishReason.ERROR:
                invalid.append(root)
            else:
                events.append(self._event(root, opened, request))
        # Behind the others, whose tokens count as delivered by now: this may break the scheduler.
        for root in invalid:
            self._end(root, InvalidNumbersError(_INVALID))
        return events

    def _crashed(self, plan: StepPlan, error: Exception | None) -> None:
        """Nothing a crashed step wrote is trusted: requests beside it start again, its own end
        here.
        """
        result = StepResult(step=plan.step, tokens={}, failed=True)
        try:
            self._recorder.commit(plan, result)
            self.scheduler.commit(result)
            self._recorder.committed()
        except Exception as broken:
            self._recover(broken)
        for root in dict.fromkeys(name.partition("#")[0] for name in plan.request_ids):
            if error is not None:
                failed = StepFailedError(f"the step that computed this request crashed: {error!r}")
                failed.__cause__ = error
                self._end(root, failed)

    def _event(self, root: str, opened: OpenRequest, request: Request) -> TokenEvent:
        branch = request.branch
        if branch:
            # Its first token makes a fork known.
            opened.requests[branch] = request
        had = opened.delivered[branch]
        opened.delivered[branch] = len(request.output_token_ids)
        if request.finish_reason is not None:
            self._close(root, branch)
        return TokenEvent(
            request_id=root,
            branch=branch,
            token_ids=tuple(request.output_token_ids[had:]),
            logprobs=tuple(request.logprobs[had:]),
            finish_reason=request.finish_reason,
        )

    # -- what is open ------------------------------------------------------------------------------

    def _end(self, request_id: str, error: OctavoError) -> None:
        """End a request that something went wrong with, and say so."""
        if self.abort(request_id):
            self._late.append(TokenEvent(request_id=request_id, error=error))

    def _close(self, request_id: str, branch: int) -> None:
        opened = self._open[request_id]
        del opened.delivered[branch]
        if not opened.delivered:
            self._recorder.close(request_id)
            del self._open[request_id]

    def _take_late(self) -> list[TokenEvent]:
        late, self._late = self._late, []
        return late

    # -- recovery ----------------------------------------------------------------------------------

    def _recover(self, error: Exception, *, blame: bool = True) -> None:
        """The scheduler broke: end the request that it was about, unless nobody is to ``blame``,
        and make a new one for all others.

        Raises EngineDeadError where it was once too often.
        """
        if not self.recovery.note(error, self._recorder):
            self._die(error)
        named = (handled(error) or "").partition("#")[0]
        if blame and self._open.pop(named, None) is not None:
            self._late.append(TokenEvent(request_id=named, error=_failed(error)))
        self._renew()

    def _renew(self) -> None:
        """A new scheduler with what is open."""
        for opened in self._open.values():
            for request in opened.unfinished():
                scored = 0 if request.branch else opened.scored
                request.rewind(opened.delivered[request.branch], scored)
        unfinished = [one for opened in self._open.values() for one in opened.unfinished()]
        try:
            self.scheduler = self.scheduler.successor(unfinished)
        except Exception as error:
            self._die(error)
        self._recorder = self._record()

    def _die(self, error: Exception) -> None:
        self._dead = EngineDeadError(f"the engine has stopped: {error!r}")
        self._open.clear()
        raise self._dead from error

    def _refuse_where_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(*self._dead.args)

    def _record(self) -> Recorder:
        return Recorder(
            self.scheduler.layout,
            self.scheduler.options,
            begun=self._open.values(),
            limit=self.recovery.record_bytes,
        )


_INVALID = (
    "the model computed NaN or infinity for this request, so it has no next token; the weights may"
    " be damaged, or too large for the dtype"
)


def _failed(error: Exception) -> RequestFailedError:
    failed = RequestFailedError(f"something broke while this request was handled: {error!r}")
    failed.__cause__ = error
    return failed
