"""Outputs with a structure, on random models that know nothing: masks do all the work.

Owns a slow reference (Transformers' logits, and another library's matcher of expressions, one token
at a time) and the public suite of JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex

from octavo import LLM, ConfigError, RequestOutput, SamplingParams, StructuredOutputs
from octavo.engine.structured import Grammars
from tests import tiny
from tests.engine.test_text import BYTES

FAMILY = "gemma3"
END = 256
SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite.json"
EXPRESSIONS = (
    r"[a-z]{3,9}(, [a-z]{3,9}){2,5}",
    r"(0|[1-9][0-9]{0,12})(\.[0-9]{1,9})?",
    r"(yes|no|perhaps)( (yes|no|perhaps)){1,6}!?",
)
PROMPTS = tuple(
    tuple(tiny.prompt(length, seed)) for length, seed in ((40, 3), (21, 4), (63, 5), (40, 6))
)
COUNT = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write(FAMILY, tmp_path_factory.mktemp("structured"))
    BYTES.backend.save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(said | {"eos_token_id": END}))
    return directory


def engine(model: Path, **options: Any) -> LLM:
    given = {"kv_memory": "16MiB", "max_model_len": 512, "device": "cpu", "dtype": "float32"}
    return LLM(model, **{**given, **options})


def params(structure: StructuredOutputs, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": COUNT, "structured_outputs": structure} | more
    )


@cache
def reference(prompt: tuple[int, ...], expression: str) -> list[int]:
    """The likeliest tokens of which every prefix can become a whole match."""
    made: list[int] = []
    while len(made) < COUNT and END not in made:
        text = bytes_of(made).decode("latin-1")
        may = [
            byte
            for byte in range(256)
            if regex.fullmatch(expression, text + bytes_of([byte]).decode("latin-1"), partial=True)
        ]
        may += [END] if regex.fullmatch(expression, text) else []
        logits = tiny.logits(FAMILY, [*prompt, *made])[-1]
        best = logits[may].topk(min(2, len(may)))
        assert len(may) == 1 or best.values[0] - best.values[1] > tiny.TIE, "a tie: another prompt"
        made.append(may[int(best.indices[0])])
    return made


def bytes_of(ids: list[int]) -> bytes:
    return b"".join(BYTES.token_bytes(token) for token in ids if token != END)


Job = tuple[tuple[int, ...], str]
JOBS: tuple[Job, ...] = tuple(
    (PROMPTS[number % len(PROMPTS)], EXPRESSIONS[number % len(EXPRESSIONS)]) for number in range(12)
)


def run(llm: LLM, jobs: tuple[Job, ...] = JOBS) -> list[RequestOutput]:
    asked = [params(StructuredOutputs(regex=expression)) for _, expression in jobs]
    return llm.generate([list(prompt) for prompt, _ in jobs], asked, progress=False)


def check(outputs: list[RequestOutput]) -> None:
    for (prompt, expression), output in zip(JOBS, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == reference(prompt, expression)
        ended = completion.token_ids[-1] == END
        assert completion.finish_reason == ("stop" if ended else "length")
        assert regex.fullmatch(expression, completion.text, partial=not ended)


def test_one_by_one(model: Path) -> None:
    llm = engine(model, enable_prefix_caching=False)
    check([run(llm, (job,))[0] for job in JOBS])


@pytest.mark.parametrize("budget", [1, 7, 33])
def test_chunked_and_batched(model: Path, budget: int) -> None:
    check(run(engine(model, max_num_batched_tokens=budget, enable_prefix_caching=False)))


def test_hits(model: Path) -> None:
    llm = engine(model)
    check(run(llm))
    again = run(llm)
    check(again)
    assert all(output.num_cached_tokens for output in again)


def test_preempted(model: Path) -> None:
    llm = engine(model, kv_memory=300_000, max_model_len=128)
    check(run(llm))
    assert llm.core.scheduler.num_preemptions, "the arena is too large for this test"


def test_continuations_have_a_state_each(model: Path) -> None:
    """Sampled: three of a prompt, alone and in a crowd, chunked and preempted."""
    expression = "[a-z]{9,60}"
    asked = params(StructuredOutputs(regex=expression), temperature=3.0, n=3, seed=5, max_tokens=60)
    prompt = list(PROMPTS[0])
    (alone,) = engine(model, enable_prefix_caching=False).generate([prompt], asked, progress=False)
    texts = [completion.text for completion in alone.outputs]
    assert len(set(texts)) > 1
    for completion in alone.outputs:
        ended = completion.finish_reason == "stop"
        assert regex.fullmatch(expression, completion.text, partial=not ended)
    crowded = engine(model, kv_memory=300_000, max_model_len=128, max_num_batched_tokens=16)
    outputs = crowded.generate([prompt] * 5, asked, progress=False)
    assert crowded.core.scheduler.num_preemptions
    for output in outputs:
        assert [completion.text for completion in output.outputs] == texts


def test_other_requests_are_left_alone(model: Path) -> None:
    plain = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    llm = engine(model, enable_prefix_caching=False)
    expected, gap = tiny.greedy(FAMILY, list(PROMPTS[1]), COUNT)
    assert gap > tiny.TIE
    prompts = [list(PROMPTS[1]), list(PROMPTS[0]), list(PROMPTS[1])]
    limited = params(StructuredOutputs(choice=["yes", "no"]))
    outputs = llm.generate(prompts, [plain, limited, plain], progress=False)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == [expected] * 2
    assert outputs[1].outputs[0].text in ("yes", "no")


def test_every_form(model: Path) -> None:
    llm = engine(model)
    forms: tuple[dict[str, Any], ...] = (
        {"choice": ['a "quoted" one', "b\nc", "ü"]},
        {"regex": "[ab]{2}c"},
        {"grammar": 'start: "x" word+\nword: "ab" | "cd"'},
        {"grammar": 'root ::= "x" ("ab" | "cd")+'},
        {"json": {"enum": [1, "two", None]}},
        {"json": '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}'},
        {"json": True},
        {"json_object": True},
    )
    checks = (
        lambda text: text in forms[0]["choice"],
        lambda text: regex.fullmatch("[ab]{2}c", text),
        lambda text: regex.fullmatch("x(ab|cd)+", text),
        lambda text: regex.fullmatch("x(ab|cd)+", text),
        lambda text: json.loads(text) in [1, "two", None],
        lambda text: all(isinstance(item, bool) for item in json.loads(text)),
        lambda text: [json.loads(text)],
        lambda text: isinstance(json.loads(text), dict),
    )
    asked = [
        params(StructuredOutputs(**form), max_tokens=200, logit_bias=ENDING, temperature=1, seed=1)
        for form in forms
    ]
    outputs = llm.generate(["say"] * len(forms), asked, progress=False)
    for form, good, output in zip(forms, checks, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop" and completion.stop_reason == END, form
        assert good(completion.text), (form, completion.text)


def ids_of(text: str) -> list[int]:
    return BYTES.encode(text)


ENDING = {
    END: 50.0,
    **dict.fromkeys(ids_of('"}]'), 12.0),
    **dict.fromkeys(ids_of(" \t\n\r"), -50.0),
}
"""Biases with which a model that knows nothing comes to an end."""


def suite() -> list[dict[str, Any]]:
    return list(json.loads(SUITE.read_text(encoding="utf-8"))["cases"])


@pytest.fixture(scope="module")
def compiled() -> list[tuple[dict[str, Any], Any]]:
    """(case, constraint) of all cases whose schema is supported."""
    grammars = Grammars(BYTES, vocab_size=257, eos_token_ids=frozenset({END}))
    found = []
    for case in suite():
        try:
            wanted = StructuredOutputs(json=case["schema"], field="response_format")
            found.append((case, grammars.constraint(wanted)))
        except ConfigError as error:
            assert str(error).startswith("response_format cannot be compiled: ")
    return found


def test_no_grammar_takes_what_a_schema_refuses(compiled: list[tuple[dict[str, Any], Any]]) -> None:
    assert len(compiled) >= 160
    taken = given = 0
    for case, constraint in compiled:
        for test in case["tests"]:
            ids = np.array(ids_of(json.dumps(test["data"], ensure_ascii=False)), np.int32)
            if constraint.accepts(ids):
                assert test["valid"], (case["description"], test["data"])
            given += test["valid"]
            taken += test["valid"] and constraint.accepts(ids)
    # Those left are right in another order of properties.
    assert taken > 0.9 * given


def test_answers_to_the_suites_schemas(
    model: Path, compiled: list[tuple[dict[str, Any], Any]]
) -> None:
    schemas = [case["schema"] for case, _ in compiled]
    asked = [
        params(
            StructuredOutputs(json=schema),
            temperature=1,
            max_tokens=300,
            logit_bias=ENDING,
            seed=number,
        )
        for number, schema in enumerate(schemas)
    ]
    outputs = engine(model).generate(["answer"] * len(asked), asked, progress=False)
    stopped = 0
    for (case, constraint), output in zip(compiled, outputs, strict=True):
        (completion,) = output.outputs
        if completion.finish_reason == "stop":
            stopped += 1
            validate(completion.text, case["schema"])
        else:
            state = constraint.follow(np.array(completion.token_ids, np.int32))
            assert state is not None, case["description"]
    assert stopped >= 0.9 * len(compiled), f"{stopped} of {len(compiled)}"


def validate(text: str, schema: Mapping[str, Any] | bool) -> None:
    checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker(schema, format_checker=checker.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"$ref": "http://elsewhere.example/schema"}}, "elsewhere.example"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"enum": []}}, "cannot be compiled"),
        ({"json": "{"}, "must be a JSON schema"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": {"a": float("nan")}}, "must be a JSON schema"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ""}, "must be a text"),
        ({"regex": "a" * 2_000_000}, "longer than"),
        ({"choice": []}, "must be a list"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["a", ""]}, "none of it empty"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "hello"}, "cannot be compiled"),
        ({"regex": "a", "choice": ["b"]}, "takes one of"),
        ({}, "none is given"),
    ],
)
def test_what_cannot_be_compiled_is_named(wanted: dict[str, Any], says: str) -> None:
    grammars = Grammars(BYTES, vocab_size=257, eos_token_ids=frozenset({END}))
    with pytest.raises(ConfigError, match=r"^(structured_outputs|request)") as caught:
        grammars.constraint(StructuredOutputs(**wanted))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_it_needs() -> None:
    wanted = StructuredOutputs(regex="a")
    without = Grammars(None, vocab_size=257, eos_token_ids=frozenset({END}))
    with pytest.raises(ConfigError, match="needs the tokenizer"):
        without.constraint(wanted)
    endless = Grammars(BYTES, vocab_size=257, eos_token_ids=frozenset({9999}))
    with pytest.raises(ConfigError, match="a token that ends a text"):
        endless.constraint(wanted)
    with pytest.raises(ConfigError, match="ignore_eos"):
        SamplingParams(structured_outputs=wanted, ignore_eos=True)


def test_logits_beyond_the_tokenizer_never_come(model: Path) -> None:
    """The model has 384 logits, the tokenizer 257 tokens."""
    asked = params(StructuredOutputs(regex="(?s:.){40}"), temperature=100.0, max_tokens=60)
    (output,) = engine(model).generate(["go"], asked, progress=False)
    assert max(output.outputs[0].token_ids) <= END
