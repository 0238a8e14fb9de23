"""What clients may send: every field with its type and range, so that the OpenAPI document is true.

Owns the request models, and how lenient they are: null is absent at every level, numbers may be
written as text, and a field that is not here is handled as ``server/fields.py`` says. Knows no
engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from octavo.sched.sampling import NUM_LOGPROBS
from octavo.server import fields
from octavo.server.fields import Refused

INT32 = 2**31 - 1
MAX_N = 128
MAX_PROMPTS = 2048
MAX_STOPS = 16
MAX_MARKS = 16
MAX_TOOLS = 1024

REFUSED, MISSPELT, NO_TEXT = "field_refused", "field_misspelt", "no_text"
"""Types of the errors that are raised here; ``ctx`` has the field's name and what to say."""

WHOLE = r"^\s*[+-]?[0-9]{1,19}(\.0*)?\s*$"
REAL = r"^\s*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*$"


def _whole(value: Any) -> Any:
    """16.0 and "16" are 16."""
    if isinstance(value, str) and re.fullmatch(WHOLE, value, re.ASCII):
        return int(value.strip().partition(".")[0])
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _ids(value: Any) -> Any:
    """Token ids of which some may be written as 16.0."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_whole(item) if isinstance(item, float) else item for item in value]
    return value


def _real(value: Any) -> Any:
    return float(value) if isinstance(value, str) and re.fullmatch(REAL, value, re.ASCII) else value


def _flag(value: Any) -> Any:
    """0 and "false" are false."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    return bool(value) if type(value) is int and value in (0, 1) else value


def _counted(value: Any) -> Any:
    """False, where a count is asked for, asks for nothing."""
    return None if value is False else _whole(value)


def _items(value: Any) -> Any:
    """A list without what is no item: null and empty texts."""
    if isinstance(value, list):
        return [item for item in value if item is not None and item != ""]
    return None if value == "" else value


def _given(value: Any) -> Any:
    return None if value == {} else value


def _parts(value: Any) -> Any:
    return [item for item in value if item is not None] if isinstance(value, list) else value


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if item is not None}
    return value


WholeText = Annotated[str, Field(pattern=WHOLE)]
RealText = Annotated[str, Field(pattern=REAL)]
AsWhole = BeforeValidator(_whole, json_schema_input_type=int | WholeText)
AsReal = BeforeValidator(_real, json_schema_input_type=float | RealText)
AsFlag = BeforeValidator(_flag, json_schema_input_type=bool | Literal[0, 1, "true", "false"])
AsCount = BeforeValidator(_counted, json_schema_input_type=int | WholeText | Literal[False] | None)

Flag = Annotated[bool, AsFlag]
Count = Annotated[int, Field(ge=1, le=INT32), AsWhole]
Limit = Annotated[int, Field(ge=-1), AsWhole]
Logprobs = Annotated[Annotated[int, Field(ge=0, le=NUM_LOGPROBS)] | None, AsCount]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
AsIds = BeforeValidator(_ids, json_schema_input_type=list[TokenId])
TokenIds = Annotated[
    list[TokenId],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_ids, json_schema_input_type=Annotated[list[TokenId], Field(min_length=1)]),
]
Text = Annotated[str, Field(max_length=2**28)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Bias = Annotated[float, Field(ge=-100, le=100), AsReal]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Biases = Annotated[
    dict[TokenName, Bias],
    BeforeValidator(_entries, json_schema_input_type=dict[TokenName, Bias | None]),
]
Prompt = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)
Stops = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None,
    BeforeValidator(_items, json_schema_input_type=str | list[str | None] | None),
]


class Lenient(BaseModel):
    """No value of another type and no NaN; null is absent; other fields are kept unread.

    refused: what is said of fields that are not this model's own.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, Refused]] = fields.NONE

    @model_validator(mode="before")
    @classmethod
    def _tidy(cls, given: Any) -> Any:
        """``given`` without nulls. Raises for fields that would change the answer, and do not."""
        if not isinstance(given, dict):
            return given
        cls._check(given)
        found = {name: value for name, value in given.items() if value is not None}
        for name, value in found.items():
            if name in cls.model_fields:
                continue
            if says := fields.refusal(name, value, cls.refused):
                raise PydanticCustomError(REFUSED, "{says}", {"name": name, "says": says})
            if cls._unknown(name) and (like := fields.meant(name, cls.model_fields)):
                raise PydanticCustomError(MISSPELT, "{says}", {"name": name, "says": like})
        return found

    @classmethod
    def _check(cls, given: dict[str, Any]) -> None:
        """Raise for what is wrong with the whole, before any field is looked at."""

    @classmethod
    def _unknown(cls, name: str) -> bool:
        return name not in cls.refused and name not in fields.HARMLESS

    def unknown(self) -> Iterator[str]:
        """Names, at every level, of which octavo knows nothing."""
        yield from filter(self._unknown, self.model_extra or ())
        for value in vars(self).values():
            for item in value if isinstance(value, list) else (value,):
                if not isinstance(item, Lenient):
                    break
                yield from item.unknown()


class Body(Lenient):
    """A whole request: every text in it, at every level, is one that UTF-8 can carry."""

    @classmethod
    def _check(cls, given: dict[str, Any]) -> None:
        if (path := _broken(given)) is not None:
            raise PydanticCustomError(NO_TEXT, "{says}", {"name": path, "says": path})


def _broken(body: dict[str, Any]) -> str | None:
    """Where a text holds a lone surrogate, which JSON may carry and no unicode string may have."""
    stack: list[tuple[str, Any]] = [("", body)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            if not value.isascii() and not _encodes(value):
                return path
        elif isinstance(value, dict):
            for name, item in value.items():
                if not name.isascii() and not _encodes(name):
                    return path
                stack.append((f"{path}.{name}" if path else name, item))
        elif isinstance(value, list) and not set(map(type, value)) <= {int, float}:
            stack += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StreamOptions(Lenient):
    """include_usage: one more chunk at the end says how many tokens there were.
    continuous_usage_stats: every chunk says how many there were so far.
    """

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class JsonSchema(Lenient):
    """A schema with a name. strict: the output always keeps to the schema."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Lenient):
    """What the answer looks like: ``text``, any JSON object, or JSON of a schema."""

    refused = fields.FORMAT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    plain_schema: dict[str, Any] | None = Field(None, alias="schema")


class Structure(Lenient):
    """What the output looks like; one of them. vLLM's names."""

    refused = fields.STRUCTURE
    json_schema: dict[str, Any] | Text | bool | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None


class Generation(Body):
    """What both ways of generating share. None is the default of ``SamplingParams`` unless said
    otherwise.
    """

    model: str | None = Field(
        None, description="Name of the served model; by default the one there is."
    )
    n: Annotated[int, Field(ge=1, le=MAX_N), AsWhole] | None = None
    temperature: Annotated[float, Field(ge=0), AsReal] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AsReal] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), AsReal] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), AsReal] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), AsWhole] | None = Field(
        None, description="Makes the answer repeatable; -1 is none."
    )
    max_tokens: Limit | None = Field(
        None, description="0 answers nothing, and scores the prompt; -1 is as many as fit."
    )
    max_completion_tokens: Limit | None = Field(
        None, description="Another name of max_tokens; both may be given where they agree."
    )
    stop: Stops = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, le=INT32), AsWhole] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), AsReal] | None = None
    repetition_penalty: Annotated[float, Field(gt=0), AsReal] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32), AsWhole] | None = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_N), AsIds, BeforeValidator(_items)] | None
    ) = None
    ignore_eos: Flag | None = None
    prompt_logprobs: Logprobs = None
    skip_special_tokens: Flag | None = Field(
        None, description="False: special tokens are part of the text."
    )

    response_format: Annotated[
        ResponseFormat | None,
        BeforeValidator(_given, json_schema_input_type=ResponseFormat | None),
    ] = None
    structured_outputs: Structure | None = None
    guided_json: dict[str, Any] | Text | bool | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    guided_grammar: Text | None = None

    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts never share cached bytes."
    )
    priority: Annotated[int, Field(ge=-INT32, le=INT32), AsWhole] | None = Field(
        None, description="Higher goes first; 0 by default."
    )
    explain_cache: Flag | None = Field(
        None, description="Say in the field `cache` why the prompt hit what it hit."
    )


class CompletionRequest(Generation):
    """POST /v1/completions."""

    refused = fields.COMPLETION
    prompt: Prompt
    echo: Flag | None = None
    logprobs: Logprobs = None
    add_special_tokens: Flag | None = Field(
        None, description="False: a text begins with no token but its own."
    )
    cache_marks: Annotated[list[Count], Field(max_length=MAX_MARKS)] | None = Field(
        None,
        description=(
            "Numbers of prompt tokens after which other prompts will go on differently; needs a"
            " single prompt."
        ),
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_N), AsWhole] | None = Field(
        None, description="Must equal n."
    )


class CacheControl(Lenient):
    """Marks where a prompt's lasting part ends. A ``ttl`` does nothing: pages stay as long as there
    is room.
    """

    type: Literal["ephemeral"]
    ttl: Any = None


class ContentPart(Lenient):
    """A piece of a message. Only text is supported."""

    refused = fields.PART
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None


class CalledFunction(Lenient):
    """What was called. arguments: JSON, as text or as an object."""

    name: Text
    arguments: Text | dict[str, Any] = ""


class ToolCall(Lenient):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Lenient):
    """One message. Parts are joined with line breaks; an assistant that said nothing needs no
    content.

    reasoning_content, reasoning: what the assistant thought, where the template shows it.
    refusal: what an assistant said instead of content.
    """

    refused = fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[ContentPart], Field(fail_fast=True)],
        BeforeValidator(_parts, json_schema_input_type=Text | list[ContentPart]),
    ]
    name: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _silent(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("role") != "assistant" and given.get("tool_calls"):
            says = "only an assistant calls tools"
            raise PydanticCustomError(REFUSED, "{says}", {"name": "tool_calls", "says": says})
        if isinstance(given, dict) and given.get("role") == "assistant":
            said = given.get("content")
            return {**given, "content": (given.get("refusal") or "") if said is None else said}
        return given


TemplateArguments = Annotated[
    dict[str, Any],
    Field(description="Variables of the chat template, such as enable_thinking."),
    BeforeValidator(_entries, json_schema_input_type=dict[str, Any]),
]
Effort = Annotated[
    str,
    Field(
        max_length=100,
        description="Given to the chat template; none also sets enable_thinking to false.",
    ),
]


class Function(Lenient):
    """A function that the model may call. parameters: the JSON schema of its arguments, an object.
    strict: calls keep to it, whatever the model would write.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Lenient):
    """A tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Lenient):
    """Of a tool."""

    name: str


class ChosenTool(Lenient):
    """The tool that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


class Templated(Body):
    """What a chat template is told beside the messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call; its chat template shows them."
    )

    add_generation_prompt: Flag | None = Field(None, description="True by default.")
    continue_final_message: Flag | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort | None = None


class ChatRequest(Generation, Templated):
    """POST /v1/chat/completions. Without a limit the answer may have as many tokens as fit."""

    refused = fields.CHAT
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        None, description="auto by default, none without tools."
    )
    parallel_tool_calls: Flag | None = Field(None, description="False: one call at most.")
    logprobs: bool | None = None
    top_logprobs: Logprobs = None


class TokenizeRequest(Templated):
    """POST /tokenize: a prompt, or messages as the chat template renders them."""

    refused = fields.TOKENIZE
    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: Flag | None = Field(
        None, description="Of a prompt, true by default; a chat has them where its model wants."
    )
    return_token_strs: Flag | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), AsIds]
