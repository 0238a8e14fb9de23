"""The official client against the server: everything that it reads, whole and streamed, sync and
async.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo.server.app import create_app
from tests.server.fakes import ANSWER, FakeEngine, serving

HELLO: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
RENDERED = "[system]Be kind.\n[user]Hello\n[assistant]"
TOKENS = len(ANSWER.encode())


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine)) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "octavo")
    assert client.models.retrieve("fake") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_completion_tokens=100)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(RENDERED), TOKENS)
    assert answer.usage.total_tokens == len(RENDERED) + TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert engine.tokenizer.decode(engine.calls[-1][1]) == RENDERED


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == ANSWER
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    *others, last = chunks
    assert all(chunk.usage is None and chunk.choices for chunk in others)
    assert last.choices == []
    assert last.usage is not None and last.usage.completion_tokens == 2 * TOKENS


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [bytes(token.bytes or ()) for token in logprobs.content] == [b"G", b"r", b"\xc3"]
    assert [token.token for token in logprobs.content] == ["G", "r", "\\xc3"]
    assert [top.token for top in logprobs.content[0].top_logprobs] == token_names([65, 66])
    assert answer.choices[0].finish_reason == "length"
    streamed = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3, stream=True
    )
    pieces = [
        choice.logprobs.content
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs is not None
    ]
    assert [token for piece in pieces for token in piece or ()] == logprobs.content


def token_names(ids: list[int]) -> list[str]:
    return [FakeEngine().tokenizer.token_bytes(token).decode() for token in ids]


def test_completion(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(
        model="fake", prompt="Hello", max_tokens=100, n=2, temperature=0.5, seed=7, stop=["x", "y"]
    )
    assert [(choice.index, choice.text, choice.finish_reason) for choice in made.choices] == [
        (0, ANSWER, "stop"),
        (1, ANSWER, "stop"),
    ]
    assert made.id.startswith("cmpl-")
    assert made.usage is not None and made.usage.completion_tokens == 2 * TOKENS
    _, prompt, params, _ = engine.calls[-1]
    assert prompt == engine.tokenizer.encode("Hello")
    assert (params.n, params.temperature, params.seed, params.stop) == (2, 0.5, 7, ("x", "y"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["ab", "c"], [[5, 6], [7]], "ab", [5, 6, 7]])
def test_prompts_in_every_shape(
    client: openai.OpenAI, engine: FakeEngine, prompt: Any, stream: bool
) -> None:
    many = prompt if isinstance(prompt[0], list) or prompt == ["ab", "c"] else [prompt]
    made: Any = client.completions.create(
        model="fake", prompt=prompt, n=2, max_tokens=4, stream=stream
    )
    texts: dict[int, str] = {}
    for part in made if stream else [made]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(2 * len(many)), "Grü")
    prompts = [one if isinstance(one, list) else engine.tokenizer.encode(one) for one in many]
    assert sorted(call[1] for call in engine.calls[-len(many) :]) == sorted(prompts)


def test_completion_default_is_16_tokens_and_chat_as_many_as_fit(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    client.completions.create(model="fake", prompt="a")
    assert engine.calls[-1][2].max_tokens == 16
    client.chat.completions.create(model="fake", messages=HELLO)
    assert engine.calls[-1][2].max_tokens is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    made: Any = client.completions.create(
        model="fake", prompt="hé", echo=True, logprobs=1, max_tokens=4, n=2, stream=stream
    )
    parts = list(made) if stream else [made]
    for index in (0, 1):
        mine = [choice for part in parts for choice in part.choices if choice.index == index]
        logprobs = [choice.logprobs for choice in mine if choice.logprobs is not None]
        assert "".join(choice.text for choice in mine) == "héGrü"
        assert [name for one in logprobs for name in one.tokens] == [
            "h",
            "\\xc3",
            "\\xa9",
            "G",
            "r",
            "\\xc3",
            "\\xbc",
        ]
        assert [value for one in logprobs for value in one.text_offset] == [0, 1, 1, 2, 3, 4, 4]
        values = [value for one in logprobs for value in one.token_logprobs]
        tokens = engine.tokenizer.encode("héGrü")
        assert values == [None, *(pytest.approx(-token / 10) for token in tokens[1:])]
        first, second, *_ = [top for one in logprobs for top in one.top_logprobs]
        assert first is None
        assert len(second) == 2
    assert engine.calls[-1][2].prompt_logprobs == 1


def test_extensions_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    sampling = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "prompt_logprobs": 2,
    }
    hints = {"cache_salt": "mine", "priority": 3, "cache_marks": [2, 4], "explain_cache": True}
    made = client.completions.create(
        model="fake",
        prompt="Hello",
        logit_bias={"7": -5},
        presence_penalty=1,
        frequency_penalty=-1,
        top_p=0.5,
        extra_body=sampling | hints,
    )
    _, _, params, options = engine.calls[-1]
    assert options == {"cache_salt": "mine", "priority": 3, "marks": [2, 4], "number": 0}
    assert {name: getattr(params, name) for name in sampling} == sampling | {"stop_token_ids": (9,)}
    assert (params.logit_bias, params.presence_penalty, params.frequency_penalty, params.top_p) == (
        {7: -5.0},
        1,
        -1,
        0.5,
    )
    raw = made.model_dump()
    assert raw["cache"]["reason"] == "no resume point behind 16 tokens"
    assert raw["cache"]["cause"] == "no_checkpoint"
    assert raw["cache"]["reach"] == [["window 16", 16], ["everything", 32]]
    scored = raw["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == 5
    e = engine.tokenizer.encode("e")[0]
    assert scored[1][str(e)] == {"logprob": -e / 10, "rank": 2, "decoded_token": "e"}


def test_explanation_comes_last_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, extra_body={"explain_cache": True}
    )
    *others, last = [chunk.model_dump() for chunk in stream]
    assert last["choices"] == []
    assert last["cache"]["limited_by"] == ["window 16"]
    assert not any("cache" in chunk for chunk in others)


def test_fields_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}],
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        safety_identifier="s",
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        prompt_cache_key="k",
        temperature=None,
        stop=None,
    )


def test_cache_control_becomes_marks(client: openai.OpenAI, engine: FakeEngine) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: Any = [
        {"role": "system", "content": "Be kind.", **mark},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "long", **mark},
                {"type": "text", "text": "short"},
            ],
        },
    ]
    client.chat.completions.create(model="fake", messages=messages)
    _, prompt, _, options = engine.calls[-1]
    assert engine.tokenizer.decode(prompt) == "[system]Be kind.\n[user]long\nshort\n[assistant]"
    assert [engine.tokenizer.decode(prompt[:mark]) for mark in options["marks"]] == [
        "[system]Be kind.\n[user]",
        "[system]Be kind.\n[user]long",
    ]


def test_tokenize_and_back(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.post(
        "/../tokenize", body={"prompt": "é<end>", "return_token_strs": True}, cast_to=dict[str, Any]
    )
    assert made == {
        "count": 3,
        "max_model_len": 200,
        "tokens": engine.tokenizer.encode("é<end>"),
        "token_strs": ["\\xc3", "\\xa9", "<end>"],
    }
    back = client.post(
        "/../detokenize", body={"tokens": engine.tokenizer.encode("aé")}, cast_to=dict[str, Any]
    )
    assert back == {"prompt": "aé"}
    chat = client.post("/../tokenize", body={"messages": HELLO}, cast_to=dict[str, Any])
    assert chat["tokens"] == engine.tokenizer.encode(RENDERED)


def test_async_client_many_at_once(url: str) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="fake", prompt=f"{number}", max_tokens=100, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            chat = await client.chat.completions.create(model="fake", messages=HELLO)
            assert chat.choices[0].message.content == ANSWER
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    assert asyncio.run(run()) == [ANSWER] * 20
