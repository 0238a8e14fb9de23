"""How likely tokens were, in the three forms that clients know.

Owns the names of tokens (their text; bytes that are no whole character are written ``\\xNN``).
Knows no endpoint.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from octavo.engine.text import Tokenizer
from octavo.sched.step import TokenLogprobs
from octavo.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    ScoredToken,
    TopLogprob,
)

LEAST = -9999.0
"""Stands for a logprob of minus infinity, which JSON cannot say."""


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """As chat completions have them."""
    content = []
    for token in tokens:
        top = [_top(tokenizer, other, logprob) for other, logprob in token.top]
        chosen = _top(tokenizer, token.token_id, token.logprob)
        content.append(ChatTokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content, refusal=None)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    name = token_name(tokenizer, token_id)
    return TopLogprob(
        token=name, logprob=max(logprob, LEAST), bytes=list(tokenizer.token_bytes(token_id))
    )


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """As vLLM's users know them."""
    return [None if token is None else _scored(tokenizer, token) for token in tokens]


def _scored(tokenizer: Tokenizer, token: TokenLogprobs) -> dict[str, ScoredToken]:
    ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(token.top, 1)}
    ranked[token.token_id] = (token.rank, token.logprob)
    return {
        str(other): ScoredToken(
            logprob=max(logprob, LEAST), rank=rank, decoded_token=token_name(tokenizer, other)
        )
        for other, (rank, logprob) in ranked.items()
    }


class LogprobsWriter:
    """Logprobs of one completion, piece by piece: it knows at which character the next token
    begins.

    count: how many likeliest tokens are told.
    """

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer, self._count = tokenizer, count
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(
        self, ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The next tokens. Nothing precedes the first of an echoed prompt, so nothing says how
        likely it was.
        """
        offsets = []
        for token_id in ids:
            offsets.append(self._offset)
            if self._tokenizer.decode([token_id]):
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return CompletionLogprobs(
            tokens=[token_name(self._tokenizer, token_id) for token_id in ids],
            token_logprobs=[
                None if token is None else max(token.logprob, LEAST) for token in tokens
            ],
            top_logprobs=[None if token is None else self._alternatives(token) for token in tokens],
            text_offset=offsets,
        )

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        tokens = [*token.top[: self._count], (token.token_id, token.logprob)]
        return {
            token_name(self._tokenizer, other): max(logprob, LEAST) for other, logprob in tokens
        }


def joined(pieces: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Pieces as one."""
    return CompletionLogprobs(
        tokens=[item for piece in pieces for item in piece.tokens],
        token_logprobs=[item for piece in pieces for item in piece.token_logprobs],
        top_logprobs=[item for piece in pieces for item in piece.top_logprobs],
        text_offset=[item for piece in pieces for item in piece.text_offset],
    )
