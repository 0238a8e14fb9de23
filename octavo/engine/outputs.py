"""What a caller gets back. Plain data, in the words vLLM's users know.

Owns ``RequestOutput`` (all there is of a request) and ``RequestDelta`` (what one step added).
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.cache.report import CacheReport, HitExplanation
from octavo.sched.step import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One continuation. ``finish_reason``: ``stop``, ``length``, ``abort`` or ``error``; None while
    it runs.

    text: without the stop string that ended it; token_ids: every token sampled, also those of a
        stop string or stop token.
    logprobs: one for every token, where asked for. stop_reason: the stop string, or the id of the
        token, that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt and its continuations.

    prompt: None where the caller gave token ids. num_cached_tokens: prompt tokens that the prefix
        cache spared.
    prompt_logprobs: of every prompt token (None for the first, which nothing precedes), where asked
        for.
    cache_report: what the cache held for the first continuation, per group, when it ended; None
        while it runs, and for a request that ended before it was admitted.
    error: what went wrong with it; None where nothing did.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cache_report: CacheReport | None = None
    finished: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionDelta:
    """What one step added to one continuation; the fields of ``CompletionOutput``, but only what is
    new.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestDelta:
    """What one step added to a request.

    prompt_logprobs: with the first delta only. cache_report: with the last. explanation: why its
        prefix hit was what it was.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: tuple[CompletionDelta, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    explanation: HitExplanation | None = None
    cache_report: CacheReport | None = None
    finished: bool = False
