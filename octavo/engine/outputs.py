"""What a caller gets back. Plain data, in the words vLLM's users know.

Owns ``RequestOutput`` and ``CompletionOutput``. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.cache.report import CacheReport


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One continuation. ``finish_reason``: ``stop``, ``length``, ``abort``, or None while it runs.

    text: without the stop string that ended it; token_ids: every token sampled, also those of a stop string or stop token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt and its continuations.

    prompt: None where the caller gave token ids. num_cached_tokens: prompt tokens that the prefix cache spared.
    cache_report: what the cache held for this request, per group, when it ended; None while it runs, and for a request that
        ended before it was admitted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    cache_report: CacheReport | None = None
    finished: bool = False
