"""The server on a real engine with a tiny model: what clients get is what the engine makes, and
nothing stays behind.

The oracle is the synchronous ``LLM`` on the same checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo import LLM, SamplingParams
from octavo.engine.aio import AsyncLLM
from octavo.observe.metrics import Metrics
from octavo.sched.step import StepPlan, StepResult
from octavo.server.app import create_app
from tests import tiny
from tests.engine.test_text import byte_tokenizer
from tests.server.fakes import TEMPLATE, serving, wait_until

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kv_memory": "16MiB",
    "max_model_len": 512,
}
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@dataclass(frozen=True)
class Running:
    """A server, and the same model without one."""

    url: str
    engine: AsyncLLM
    llm: LLM
    client: openai.OpenAI


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_model(tmp_path_factory.mktemp("served"))
    metrics = Metrics()
    engine = AsyncLLM.load(str(model), recorder=metrics, max_waiting=64, max_num_seqs=4, **OPTIONS)
    app = create_app(engine, model_name="tiny", metrics=metrics)
    with (
        serving(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Running(url, engine, LLM(model, **OPTIONS), client)
    assert not engine.is_alive


def write_model(directory: Path) -> Path:
    """A tiny Gemma 3 with a byte tokenizer and a chat template."""
    model = tiny.write("gemma3", directory)
    tokenizer = byte_tokenizer()
    tokenizer.backend.chat_template = TEMPLATE
    tokenizer.backend.save_pretrained(model)
    return model


def expected(running: Running, prompt: Any, **params: Any) -> str:
    fields = {"temperature": 0, "ignore_eos": True} | params
    (output,) = running.llm.generate([prompt], SamplingParams(**fields), progress=False)
    return output.outputs[0].text


def values(running: Running) -> dict[tuple[str, str], float]:
    """(metric, state or cause or reason) -> sum."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(httpx2.get(f"{running.url}/metrics").text):
        for sample in family.samples:
            key = (
                sample.name,
                next(
                    (
                        sample.labels[name]
                        for name in ("state", "cause", "reason")
                        if name in sample.labels
                    ),
                    "",
                ),
            )
            found[key] = found.get(key, 0) + sample.value
    return found


def idle(running: Running) -> bool:
    now = values(running)
    return not (
        now["octavo_requests_running", ""]
        or now["octavo_requests_waiting", ""]
        or now["octavo_group_pages", "held"]
        or now["octavo_group_pages", "limbo"]
    )


def test_many_clients_get_what_each_would_get_alone(running: Running) -> None:
    prompts = [f"{number} times the same " * (1 + number % 5) for number in range(12)]

    async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
        made: Any = await client.completions.create(
            prompt=prompt, max_tokens=12, stream=stream, **GREEDY
        )
        return (
            "".join([part.choices[0].text async for part in made])
            if stream
            else made.choices[0].text
        )

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(
                *(ask(client, prompt, number % 2 == 0) for number, prompt in enumerate(prompts))
            )

    assert asyncio.run(run()) == [expected(running, prompt, max_tokens=12) for prompt in prompts]
    assert wait_until(lambda: idle(running))


def test_chat_is_its_template_continued(running: Running) -> None:
    messages: Any = [{"role": "user", "content": "Hello there"}]
    answer = running.client.chat.completions.create(messages=messages, max_tokens=9, **GREEDY)
    assert answer.choices[0].message.content == expected(
        running, "[user]Hello there\n[assistant]", max_tokens=9
    )


def test_a_second_prompt_hits_and_says_so(running: Running) -> None:
    prompt = "A long beginning that several prompts share, word for word. " * 3
    ask: Any = {
        **GREEDY,
        "extra_body": {"ignore_eos": True, "explain_cache": True, "cache_salt": "s"},
    }
    first = running.client.completions.create(prompt=prompt, max_tokens=4, **ask)
    second = running.client.completions.create(prompt=prompt, max_tokens=4, **ask)
    assert first.usage is not None and first.usage.prompt_tokens_details is not None
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= len(prompt) - 32
    assert first.choices[0].text == second.choices[0].text
    said = second.model_dump()["cache"]
    assert said["hit_tokens"] == second.usage.prompt_tokens_details.cached_tokens
    assert said["reason"]
    other: Any = {**GREEDY, "extra_body": {"ignore_eos": True, "cache_salt": "t"}}
    stranger = running.client.completions.create(prompt=prompt, max_tokens=4, **other)
    assert stranger.usage is not None and stranger.usage.prompt_tokens_details is not None
    assert stranger.usage.prompt_tokens_details.cached_tokens == 0


def test_a_marked_message_is_a_resume_point(running: Running) -> None:
    system = "Be brief and be kind, and never forget what the system says. " * 4
    mark = {"cache_control": {"type": "ephemeral"}}

    def ask(user: str) -> int:
        messages: Any = [
            {"role": "system", "content": system.strip(), **mark},
            {"role": "user", "content": user},
        ]
        answer = running.client.chat.completions.create(messages=messages, max_tokens=2, **GREEDY)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    ask("Who are you, and what is all this about, if I may ask?")
    assert ask("something else entirely, at some length") >= len(system) - 16


def test_n_and_seeds(running: Running) -> None:
    made = [
        running.client.completions.create(
            model="tiny", prompt="Once", n=3, seed=5, temperature=1.5, max_tokens=8
        )
        for _ in range(2)
    ]
    texts = [[choice.text for choice in one.choices] for one in made]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_logprobs_of_prompt_and_output(running: Running) -> None:
    made = running.client.completions.create(
        prompt="Hello", echo=True, logprobs=2, max_tokens=3, **GREEDY
    )
    logprobs = made.choices[0].logprobs
    assert (
        logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    )
    ids = running.llm.tokenizer.encode("Hello")  # type: ignore[union-attr]
    log_softmax = tiny.logits("gemma3", ids).log_softmax(-1)
    assert logprobs.tokens[:5] == list("Hello")
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:5] == pytest.approx(
        [float(log_softmax[place, token]) for place, token in enumerate(ids[1:])], abs=1e-3
    )
    assert len(logprobs.tokens) == 8


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": "a" * 512}, "prompt", "512"),
        ({"prompt": [tiny.VOCAB]}, "prompt", "vocabulary"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "vocabulary"),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "vocabulary"),
        ({"prompt": ""}, "prompt", "empty"),
    ],
)
def test_what_the_engine_refuses_is_400(
    running: Running, fields: dict[str, Any], param: str, message: str
) -> None:
    for stream in (False, True):
        response = httpx2.post(f"{running.url}/v1/completions", json={"stream": stream, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert message in response.json()["error"]["message"]


def test_a_full_queue_is_429_and_what_no_queue_could_take_is_400(running: Running) -> None:
    url = f"{running.url}/v1/completions"
    body = {"prompt": "a", "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": True}
    # One client, since making one takes long; and the lines are kept, since forgetting them would
    # close the stream.
    with httpx2.Client(timeout=60) as client, client.stream("POST", url, json=body) as others:
        next(lines := others.iter_lines())
        response = client.post(url, json={"prompt": [[65]] * 65, "max_tokens": 2})
        next(lines)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert wait_until(lambda: idle(running))
    for fields, param in (
        ({"prompt": ["a"] * 35, "n": 2}, "prompt"),
        ({"prompt": "a", "n": 69}, "n"),
    ):
        response = httpx2.post(url, json=fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert "68 at once" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_frees_his_pages(running: Running, stream: bool) -> None:
    before = values(running).get(("octavo_requests_finished_total", "abort"), 0)
    body = {"prompt": "a" * 100, "max_tokens": 400, "n": 4, "ignore_eos": True, "stream": stream}
    with pytest.raises(httpx2.ReadTimeout):
        if stream:
            with httpx2.stream("POST", f"{running.url}/v1/completions", json=body) as response:
                next(response.iter_lines())
                raise httpx2.ReadTimeout("enough")
        httpx2.post(f"{running.url}/v1/completions", json=body, timeout=0.2)
    assert wait_until(lambda: idle(running))
    assert values(running)["octavo_requests_finished_total", "abort"] == before + 1


def test_a_crashed_step_fails_its_requests_and_the_server_goes_on(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = running.engine._core._runner
    execute, left = runner.execute, [1]

    def crash(plan: StepPlan) -> StepResult:
        if plan.output_len.max() == 2 and left.pop():
            raise RuntimeError("the device is on fire")
        return execute(plan)

    before = values(running)
    for stream, status in ((False, 500), (True, 200)):
        left[:] = [0, 1]
        with monkeypatch.context() as patched:
            patched.setattr(runner, "execute", crash)
            # With logprobs every token is an event, whether or not it ends a character.
            body = {
                "prompt": "will this do?",
                "max_tokens": 9,
                "ignore_eos": True,
                "logprobs": 0,
                "stream": stream,
            }
            response = httpx2.post(f"{running.url}/v1/completions", json=body)
        assert response.status_code == status
        assert '"code":"step_failed"' in response.text
        assert "on fire" not in response.text
    made = running.client.completions.create(prompt="will this do?", max_tokens=9, **GREEDY)
    assert made.choices[0].text == expected(running, "will this do?", max_tokens=9)
    assert wait_until(lambda: idle(running))
    after = values(running)
    assert after["octavo_crashed_steps_total", ""] - before["octavo_crashed_steps_total", ""] == 2
    assert after["octavo_requests_finished_total", "error"] == 2


def test_metrics_and_cache_tell_what_was_done(running: Running) -> None:
    before = values(running)
    running.client.completions.create(prompt="measure this", max_tokens=5, **GREEDY)
    assert wait_until(lambda: idle(running))
    after = values(running)

    def grew(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0)

    assert grew("octavo_prompt_tokens_total") == len("measure this")
    assert grew("octavo_generated_tokens_total") == 5
    assert grew("octavo_requests_finished_total", "length") == 1
    assert grew("octavo_time_to_first_token_seconds_count") == 1
    assert grew("octavo_inter_token_seconds_count") == 4
    assert grew("octavo_request_seconds_count") == 1
    snapshot = httpx2.get(f"{running.url}/cache").json()
    assert snapshot["model"]
    assert snapshot["requests"] == []
    cached = sum(group["cached"] for group in snapshot["cache"]["groups"])
    assert cached == after["octavo_group_pages", "cached"] == after["octavo_bucket_pages", "cached"]


# -- how long an answer may be ---------------------------------------------------------------------


def test_a_chat_without_a_limit_ends_where_nothing_more_fits(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = tiny.write("llama", tmp_path_factory.mktemp("narrow"))
    tokenizer = byte_tokenizer()
    tokenizer.backend.chat_template = TEMPLATE
    tokenizer.backend.save_pretrained(model)
    narrow = {"dtype": "float32", "device": "cpu", "kv_memory": "768KiB"}
    engine = AsyncLLM.load(str(model), **narrow)
    body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    with serving(create_app(engine, model_name="tiny")) as url, httpx2.Client(timeout=60) as client:
        longest = client.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
        assert 100 < longest == engine.max_model_len < 4096
        for limit in ({}, {"max_tokens": 3000}, {"max_completion_tokens": "2000"}):
            made = client.post(f"{url}/v1/chat/completions", json=body | limit).json()
            assert made["choices"][0]["finish_reason"] == "length"
            assert made["usage"]["total_tokens"] == longest
        made = client.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": -1} | {"ignore_eos": True}
        ).json()
        assert made["usage"]["total_tokens"] == longest
        refused = client.post(f"{url}/v1/completions", json={"prompt": "a" * longest})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert f"enough for {longest:,} tokens" in refused.json()["error"]["message"]


def test_scoring_without_generating(running: Running) -> None:
    url = f"{running.url}/v1/completions"
    ask = {"prompt": ["Hello there", "and goodbye"], "echo": True, "logprobs": 10, "temperature": 0}
    nothing, one = (httpx2.post(url, json=ask | {"max_tokens": limit}).json() for limit in (0, 1))
    assert nothing["usage"]["completion_tokens"] == 0
    for empty, other in zip(nothing["choices"], one["choices"], strict=True):
        assert empty["finish_reason"] == "length"
        assert empty["text"] == ask["prompt"][empty["index"]]  # type: ignore[index]
        for name, values in empty["logprobs"].items():
            assert len(values) == len(empty["text"])
            assert values == other["logprobs"][name][: len(values)]
    bare = httpx2.post(url, json={"prompt": "a", "max_tokens": 0}).json()
    assert (bare["choices"][0]["text"], bare["choices"][0]["finish_reason"]) == ("", "length")
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    made = httpx2.post(f"{running.url}/v1/chat/completions", json=chat).json()
    assert made["choices"][0]["message"]["content"] == ""
    assert (made["choices"][0]["finish_reason"], made["usage"]["completion_tokens"]) == (
        "length",
        0,
    )
    for body, path in ((ask | {"max_tokens": 0}, url), (chat, url.replace("comp", "chat/comp"))):
        streamed = httpx2.post(path, json=body | {"stream": True})
        assert '"finish_reason":"length"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_sampling_differs_from_request_to_request_unless_seeded(running: Running) -> None:
    def ask(**more: Any) -> str:
        made = running.client.completions.create(
            model="tiny", prompt="Once", temperature=1.5, max_tokens=12, **more
        )
        return made.choices[0].text

    assert ask() != ask()
    assert ask(seed=3) == ask(seed=3) != ask(seed=4)
    assert ask(seed=-1) != ask(seed=-1)


def test_the_servers_seed_is_that_of_requests_without_one(tmp_path: Path) -> None:
    model, texts = write_model(tmp_path), []
    body = {"prompt": ["Once", "Once"], "temperature": 1.5, "max_tokens": 12}
    for _ in range(2):
        engine = AsyncLLM.load(str(model), seed=5, **OPTIONS)
        with serving(create_app(engine)) as url:
            for more in ({}, {}, {"seed": 5}):
                made = httpx2.post(f"{url}/v1/completions", json=body | more).json()
                texts.append([choice["text"] for choice in made["choices"]])
    first, again, seeded = texts[:3]
    assert first == again == texts[3]
    assert first[0] != first[1]
    assert seeded == [first[0]] * 2
