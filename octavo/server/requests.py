"""What clients may send: every field with its type and range, so that the OpenAPI document is true.

Owns the request models. Knows no engine. A field that is not here is refused by its name; fields of
the OpenAI API that ask for something octavo does not do are here with the values that ask for
nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.sched.sampling import NUM_LOGPROBS

INT32 = 2**31 - 1
MAX_N = 128
MAX_PROMPTS = 2048
MAX_STOPS = 16
MAX_MARKS = 16

UNSUPPORTED = MappingProxyType(
    {
        "audio": "octavo reads and writes text only",
        "best_of": "ask for n continuations and choose",
        "function_call": "octavo calls no functions",
        "functions": "octavo calls no functions",
        "modalities": "octavo reads and writes text only",
        "moderation": "octavo moderates nothing",
        "prediction": "octavo does not speculate",
        "reasoning_effort": "say so in the messages",
        "response_format": "octavo does not constrain its output; only the type text works",
        "service_tier": "there is one tier; use priority",
        "store": "octavo stores no completions",
        "suffix": "octavo continues text and does not fill in",
        "tool_choice": "octavo calls no tools",
        "tools": "octavo calls no tools",
        "verbosity": "say so in the messages",
        "web_search_options": "octavo does not search",
    }
)
"""Fields of the OpenAI API that octavo knows and cannot serve, and what to say of them."""

Count = Annotated[int, Field(ge=1, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(max_length=2**28)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Nothing = Annotated[list[Any], Field(max_length=0)]
Prompt = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class Strict(BaseModel):
    """No field but those named, no value of another type, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """include_usage: one more chunk at the end says how many tokens there were.
    include_obfuscation: accepted, does nothing.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Strict):
    """What both ways of generating share. None is the default of ``SamplingParams`` unless said
    otherwise.
    """

    model: str | None = Field(
        None, description="Name of the served model; by default the one there is."
    )
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenName, Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_N)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=NUM_LOGPROBS)] | None = None

    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts never share cached bytes."
    )
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] | None = Field(
        None, description="Higher goes first; 0 by default."
    )
    explain_cache: bool | None = Field(
        None, description="Say in the field `cache` why the prompt hit what it hit."
    )

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=NUM_LOGPROBS)] | None = None
    cache_marks: Annotated[list[Count], Field(max_length=MAX_MARKS)] | None = Field(
        None,
        description=(
            "Numbers of prompt tokens after which other prompts will go on differently; needs a"
            " single prompt."
        ),
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(None, description="Must equal n.")
    suffix: Literal[""] | None = None


class CacheControl(Strict):
    """Marks where a prompt's lasting part ends."""

    type: Literal["ephemeral"]
    ttl: str | None = Field(None, description="Accepted; pages stay as long as there is room.")


class ContentPart(Strict):
    """A piece of a message. Only text is supported."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None


class Message(Strict):
    """One message. Parts are joined with line breaks."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)]
    name: str | None = None
    refusal: None = None
    cache_control: CacheControl | None = None


class TextFormat(Strict):
    """The only response format."""

    type: Literal["text"]


class ChatRequest(Generation):
    """POST /v1/chat/completions. ``max_tokens`` is the older name of ``max_completion_tokens``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=NUM_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    audio: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or messages as the chat template renders them."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = Field(True, description="Of a prompt; a chat template says itself.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
