"""What must hold after every step and at the end of every request.

Owns the expected output of a request and the probes of its state. Knows the truth about each request and the scheduler's
public face; changes nothing.
"""

from __future__ import annotations

from octavo.sched.request import FinishReason, Request
from octavo.sim.fake import Truth, Violation


def expected_end(request: Request, truth: Truth, *, max_model_len: int) -> tuple[list[int], FinishReason]:
    """Output and reason of a request that nobody aborts."""
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    room = max_model_len - len(request.prompt_token_ids)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    output = truth.output(limit)
    for length, token in enumerate(output, 1):
        if token in stops:
            return output[:length], FinishReason.STOP
    return output, FinishReason.LENGTH


def check_output(request: Request, truth: Truth) -> None:
    """What a request has generated so far is the beginning of what it would generate alone, without any cache."""
    output = request.output_token_ids
    if list(output) != truth.output(len(output)):
        raise Violation(f"{request.request_id}: output {list(output)} should be {truth.output(len(output))}")


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
                f"{name} was aborted, ended as {found} after {len(request.output_token_ids)} of {len(output)} tokens"
            )
    elif (len(request.output_token_ids), found) != (len(output), reason):
        raise Violation(
            f"{name} ended as {found} after {len(request.output_token_ids)} tokens, should be {reason} after {len(output)}"
        )
