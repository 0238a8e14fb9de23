"""What clients get: the records of the OpenAI API, and what octavo adds to them.

Owns the response models. A field without a default is always there, null included; one with a
default is there where it was asked for (models are written with ``exclude_unset``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from octavo.cache.report import HitExplanation


class ErrorDetail(BaseModel):
    """param: the field that is wrong, where one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every response that is not a success."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens that the prefix cache spared."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request, over all its prompts and continuations."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ScoredToken(BaseModel):
    """One alternative at one position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, ScoredToken] | None]
"""For every prompt token, itself and the likeliest ones by their ids; null for the first."""


class CompletionLogprobs(BaseModel):
    """Lists with one item per token. text_offset: where the token begins in the choice's whole
    text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation, or a piece of it.

    finish_reason: stop or length. stop_reason: the stop string or stop token that ended it.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """POST /v1/completions, and each of its chunks. cache: one per prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    cache: HitExplanation | list[HitExplanation | None] | None = None


class TopLogprob(BaseModel):
    """bytes: what the token stands for; they need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One item per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class Called(BaseModel):
    """What the model calls. arguments: a JSON object, as text."""

    name: str
    arguments: str


class ChatCall(BaseModel):
    """One call of a tool. index: its number among the answer's, in a stream."""

    index: int | None = None
    id: str
    type: Literal["function"]
    function: Called


class ChatMessage(BaseModel):
    """The assistant's answer. content: null where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class Chat(BaseModel):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    cache: HitExplanation | None = None


class ChatDelta(BaseModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    cache: HitExplanation | None = None


class Model(BaseModel):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TextOf(BaseModel):
    """POST /detokenize."""

    prompt: str


class Health(BaseModel):
    """GET /health."""

    status: Literal["ok"]


class Version(BaseModel):
    """GET /version."""

    version: str
