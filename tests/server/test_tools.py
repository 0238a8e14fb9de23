"""Tools, thoughts and structured answers over HTTP, with the official client: on answers made up,
and on a tiny random model that a grammar makes call tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from octavo import LLM
from octavo.engine.aio import AsyncLLM
from octavo.server.app import create_app
from tests import tiny
from tests.engine.test_text import byte_tokenizer
from tests.server.fakes import FakeEngine, serving

USER: Any = [{"role": "user", "content": "Weather?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Looks.", "parameters": PARAMETERS},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
ANSWER = (
    "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    engine.max_model_len = 4000
    engine.tokenizer.backend.chat_template = TEMPLATE
    with serving(create_app(engine)) as url:  # type: ignore[arg-type]
        yield engine, url


@pytest.fixture
def engine(started: tuple[FakeEngine, str]) -> FakeEngine:
    started[0].answer = ANSWER
    return started[0]


@pytest.fixture(scope="module")
def client(started: tuple[FakeEngine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{started[1]}/v1", api_key="none", max_retries=0) as asks:
        yield asks


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.calls[-1][1])


def joined(chunks: Any) -> tuple[str, str, list[dict[str, str]], str | None, set[str]]:
    """(thoughts, text, calls, why it ended, ids of calls) of a stream with one choice."""
    thought = text = ""
    calls: dict[int, dict[str, str]] = {}
    end, ids = None, set()
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            thought += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
            for call in delta.tool_calls or ():
                one = calls.setdefault(call.index, {"name": "", "arguments": ""})
                one["name"] += call.function.name or ""
                one["arguments"] += call.function.arguments or ""
                ids.add(call.id)
            end = choice.finish_reason or end
    return thought, text, [calls[number] for number in sorted(calls)], end, ids


def test_calls_text_and_thoughts(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS)
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    first, second = choice.message.tool_calls or ()
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == (
        "get_weather",
        {"city": "Paris", "days": 2},
    )
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id.startswith("call_") and first.id != second.id
    assert '"get_weather"' in prompt_of(engine) and "Looks." in prompt_of(engine)
    _, _, params, options = engine.calls[-1]
    assert params.structured_outputs is None and "shown" not in options


def test_a_stream_says_the_same(client: openai.OpenAI, engine: FakeEngine) -> None:
    whole = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS)
    stream = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, stream=True)
    thought, text, calls, end, ids = joined(stream)
    message = whole.choices[0].message
    assert thought == message.reasoning_content  # type: ignore[attr-defined]
    assert (text, end) == (message.content, "tool_calls")
    assert calls == [one.function.model_dump() for one in message.tool_calls or ()]
    assert len(ids) == 2


def test_logprobs_go_with_a_stream_of_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=USER, tools=TOOLS, stream=True, logprobs=True
    )
    tokens = [
        one.token
        for chunk in stream
        for choice in chunk.choices
        for one in (choice.logprobs.content if choice.logprobs else None) or ()
    ]
    assert "".join(tokens) == ANSWER


def test_only_calls_leave_no_content(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    made = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, n=2)
    for choice in made.choices:
        assert choice.message.content is None and len(choice.message.tool_calls or ()) == 1
    ids = {call.id for choice in made.choices for call in choice.message.tool_calls or ()}
    assert len(ids) == 2


def test_cut_off_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, max_tokens=60)
    (choice,) = made.choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert (choice.message.content or "").startswith("I look.\n<tool_call>")


def test_one_call_at_most(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.chat.completions.create(
        model="fake", messages=USER, tools=TOOLS, parallel_tool_calls=False
    )
    assert [one.function.name for one in made.choices[0].message.tool_calls or ()] == [  # type: ignore[union-attr]
        "get_weather"
    ]


def test_without_tools_calls_are_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        made = client.chat.completions.create(model="fake", messages=USER, **more)  # type: ignore[call-overload]
        message = made.choices[0].message
        assert message.tool_calls is None and "<tool_call>" in message.content
        assert message.reasoning_content == "Hm."
        assert "get_weather" not in prompt_of(engine)


def test_a_conversation_with_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    """What the server answered goes back in, and reaches the template as objects."""
    made = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS)
    message = made.choices[0].message.model_dump()
    results: Any = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        for call in message["tool_calls"]
    ]
    client.chat.completions.create(model="fake", messages=[*USER, message, *results], tools=TOOLS)
    prompt = prompt_of(engine)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}' in prompt
    assert prompt.count("[tool]sunny") == 2 and "<think>Hm.</think>" in prompt


def test_thoughts_that_the_template_begins(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = "Hm, hm.\n</think>\n\nYes."
    made = client.chat.completions.create(
        model="fake",
        messages=USER,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = made.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, hm.", "Yes.")  # type: ignore[attr-defined]


def test_what_the_tokens_have_to_keep_to(client: openai.OpenAI, engine: FakeEngine) -> None:
    def structure(**more: Any) -> Any:
        client.chat.completions.create(model="fake", messages=USER, **more)
        return engine.calls[-1][2].structured_outputs

    assert structure(response_format={"type": "text"}) is None
    assert structure(response_format={"type": "json_object"}).json_object
    assert json.loads(structure(response_format=FORMAT).json) == SCHEMA
    assert "@body" in structure(response_format=FORMAT).around, "thoughts come first"
    assert structure(extra_body={"structured_outputs": {"regex": "a+"}}).regex == "a+"
    assert structure(extra_body={"guided_choice": ["a", "b"]}).choice == ("a", "b")
    assert structure(extra_body={"guided_json": SCHEMA}).field == "guided_json"
    assert structure(tools=TOOLS) is None
    required = structure(tools=TOOLS, tool_choice="required").grammar
    assert "get_weather" in required and "now" in required
    named = {"type": "function", "function": {"name": "now"}}
    assert "get_weather" not in structure(tools=TOOLS, tool_choice=named).grammar
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert "get_weather" in structure(tools=[strict]).grammar
    both = structure(tools=TOOLS, response_format=FORMAT)
    assert json.loads(both.json) == SCHEMA and "get_weather" in both.around


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [NOW, NOW]}, "tools", "two of the name 'now'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool 'x'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (
            {"response_format": FORMAT, "guided_regex": "a"},
            "response_format",
            "both say what the output looks like",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "none is given"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "send tools",
        ),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "where it ends"),
    ],
)
def test_what_is_refused(
    started: tuple[FakeEngine, str], more: dict[str, Any], param: str, says: str
) -> None:
    response = httpx2.post(f"{started[1]}/v1/chat/completions", json={"messages": USER, **more})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and says in error["message"]


def test_templates_that_know_no_tools() -> None:
    engine = FakeEngine()
    with serving(create_app(engine)) as url:  # type: ignore[arg-type]
        body = {"messages": USER, "tools": TOOLS}
        error = httpx2.post(f"{url}/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "tools" and "--answer-format" in error["message"]
    with serving(create_app(FakeEngine(), answer_format="hermes")) as url:  # type: ignore[arg-type]
        error = httpx2.post(f"{url}/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "tools" and "does not show them" in error["message"]
        body["tool_choice"] = "none"
        assert httpx2.post(f"{url}/v1/chat/completions", json=body).status_code == 200


# -- a real model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A random model; its tokenizer has the markers as tokens, one kind of them special."""
    directory = tiny.write("gemma3", tmp_path_factory.mktemp("tools"))
    backend = byte_tokenizer().backend
    backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    backend.add_special_tokens({"additional_special_tokens": ["<unseen>"]})
    backend.chat_template = TEMPLATE
    backend.save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(said | {"eos_token_id": 256}))
    llm = LLM(directory, dtype="float32", device="cpu", kv_memory="16MiB", max_model_len=2000)
    with serving(create_app(AsyncLLM(llm))) as url:
        yield url


BIAS = {"256": 50, "1": 12, "92": 12, "60": 12, "260": 20, "220": -50, "197": -50, "198": -50}
"""The end, quotes and brackets, the end of thoughts; and no blanks."""

ASK: Any = {"model": "gemma3", "messages": USER, "logit_bias": BIAS, "max_tokens": 400, "seed": 1}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_model_made_to_call(real: str, choice: Any, thinking: bool) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": thinking}}
    with openai.OpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0) as asks:
        options: Any = {**ASK, "tools": TOOLS, "tool_choice": choice, "extra_body": more}
        made = asks.chat.completions.create(**options)
        (answer,) = made.choices
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        for one in answer.message.tool_calls or ():
            assert one.type == "function"
            given = json.loads(one.function.arguments)
            assert choice == "required" or one.function.name == "now"
            if one.function.name == "get_weather":
                jsonschema.validate(given, PARAMETERS)
        thought, text, calls, end, _ = joined(asks.chat.completions.create(stream=True, **options))
        assert (text, end) == ("", "tool_calls")
        assert calls == [one.function.model_dump() for one in answer.message.tool_calls or ()]
        assert thought == (getattr(answer.message, "reasoning_content", None) or "")


@pytest.mark.parametrize("thinking", [False, True])
def test_a_model_made_to_answer_in_json(real: str, thinking: bool) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": thinking}}
    with openai.OpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0) as asks:
        made = asks.chat.completions.create(**ASK, response_format=FORMAT, extra_body=more, n=3)
        for choice in made.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_completions_keep_to_a_structure_too(real: str) -> None:
    with openai.OpenAI(base_url=f"{real}/v1", api_key="none", max_retries=0) as asks:
        made = asks.completions.create(
            model="gemma3",
            prompt=["a", "b"],
            max_tokens=50,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
        assert all(choice.text in ("yes", "no") for choice in made.choices)
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
            asks.completions.create(
                model="gemma3",
                prompt="a",
                extra_body={"guided_json": {"type": "array", "uniqueItems": True}},
            )
        assert caught.value.param == "guided_json"


def test_special_tokens_are_shown_where_asked(real: str) -> None:
    ask = {"prompt": "a", "max_tokens": 3, "logit_bias": {"261": 100}, "temperature": 0}
    seen = httpx2.post(f"{real}/v1/completions", json={**ask, "skip_special_tokens": False}).json()
    assert seen["choices"][0]["text"] == "<unseen>" * 3
    hidden = httpx2.post(f"{real}/v1/completions", json=ask).json()
    assert hidden["choices"][0]["text"] == ""
