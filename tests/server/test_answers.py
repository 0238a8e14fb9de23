"""Answers of every family, whole and cut at every character: thoughts, text and calls apart, no
marker left in text, and what is no call given back as text. Grammars make such answers and no
others.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex

from octavo.base import ConfigError
from octavo.runner.masks import Masks, Matcher, Vocabulary
from octavo.server.answers.calls import Call, typed
from octavo.server.answers.formats import FORMATS, NAMED, NONE, THINK, Format, detect, format_of
from octavo.server.answers.grammar import Opening, around_body, calls_grammar
from octavo.server.answers.parser import AnswerParser

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "deep": {
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"type": "integer"}},
                "b": {"type": ["string", "null"]},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "deep"],
    "additionalProperties": False,
}
SCHEMAS = {
    "get_weather": WEATHER,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
GIVEN = {"city": 'Pa"r<i>s, {世界}', "days": 2, "deep": {"a": [1, 2], "b": None}}
PARIS = {"city": "Paris", "days": 2}
BOTH = [("get_weather", GIVEN), ("now", {})]
SHORT = [("get_weather", PARIS), ("now", {})]
JSON, SMALL = json.dumps(GIVEN, ensure_ascii=False), json.dumps(PARIS)
DEEP = json.dumps(GIVEN["deep"])

Transcript = tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]
"""(format, what the model writes, thoughts, text, calls)"""

TRANSCRIPTS: tuple[Transcript, ...] = (
    (
        "hermes",
        "<think>\nI see.\n</think>\n\nLet me look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
        "I see.",
        "Let me look.",
        BOTH,
    ),
    ("hermes", "Plain text, 1 < 2 and <b>bold</b>.", "", "Plain text, 1 < 2 and <b>bold</b>.", []),
    ("hermes", "  two\n\nparagraphs\n", "", "  two\n\nparagraphs\n", []),
    (
        "qwen_xml",
        "<think>\nhm\n</think>\n\nOK\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        f"{GIVEN['city']}\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=deep>\n{DEEP}"
        "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "hm",
        "OK",
        BOTH,
    ),
    (
        "glm",
        f"<think>hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        f"{GIVEN['city']}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        f"<arg_key>deep</arg_key>\n<arg_value>{DEEP}</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        "hm",
        "",
        BOTH,
    ),
    (
        "llama",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        "",
        BOTH,
    ),
    ("llama", f'{{"name": "get_weather", "parameters": {SMALL}}}', "", "", SHORT[:1]),
    (
        "llama",
        '{"name": "Ann", "parameters": {"age": 3}}',
        "",
        '{"name": "Ann", "parameters": {"age": 3}}',
        [],
    ),
    ("llama", "Just [1] text {2}", "", "Just [1] text {2}", []),
    (
        "pythonic",
        '[get_weather(city="Paris", days=2), now()]',
        "",
        "",
        SHORT,
    ),
    ("pythonic", "[1, 2]", "", "[1, 2]", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        "",
        BOTH,
    ),
    (
        "mistral",
        f"[THINK]hm[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{JSON}"
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        "hm",
        "Sure.",
        BOTH,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
        "I think.",
        "",
        BOTH[:1],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Let me look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
        " json<|message|>{}",
        "I think.",
        "Let me look.",
        BOTH[1:],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        " Two.<|end|><|start|>assistant<|channel|>final<|message|>Done, 1 < 2.",
        "One.Two.",
        "Done, 1 < 2.",
        [],
    ),
    (
        "deepseek",
        f"<think>hm</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        f"<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "hm",
        "Look:",
        BOTH,
    ),
    (
        "deepseek_fenced",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        BOTH,
    ),
    (
        "dsml",
        'I will.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{GIVEN["city"]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="deep" string="false">{DEEP}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        "I will.",
        BOTH,
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        "",
        BOTH,
    ),
    (
        "gemma",
        '<|channel>thought\nhm\n<channel|>Hi.<|tool_call>call:get_weather{city:<|"|>'
        f'{GIVEN["city"]}<|"|>,days:2,deep:{{a:[1,2],b:null}}}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "hm",
        "Hi.",
        BOTH,
    ),
    (
        "function_gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
        "",
        SHORT,
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris", days=2), now()]<|tool_call_end|>Looking.',
        "",
        "Looking.",
        SHORT,
    ),
    (
        "list",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}, '
        '{"name": "now", "arguments": {}}]<|/tool_call|>',
        "",
        "",
        BOTH,
    ),
)


def form_of(name: str) -> Format:
    """A format whose model thinks between the usual markers, unless it has its own."""
    found = NAMED[name]
    return found if found.thoughts or found.regions else replace(found, thoughts=THINK)


def read(
    form: Format, pieces: list[str], *, calling: bool = True, thinking: bool = False
) -> tuple[str, str, list[Call]]:
    """(thoughts, text, calls), joined."""
    parser = AnswerParser(form, SCHEMAS if calling else None, thinking=thinking)
    said = [one for piece in pieces for one in parser.push(piece)] + [*parser.finish()]
    return (
        "".join(one.thought for one in said),
        "".join(one.text for one in said),
        [one.call for one in said if one.call is not None],
    )


def cuts(text: str) -> list[list[str]]:
    """A text whole, in single characters, and cut once at every place."""
    return [
        [text],
        list(text),
        [text[at : at + 3] for at in range(0, len(text), 3)],
        *([text[:at], text[at:]] for at in range(1, len(text))),
    ]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda one: one[0])
def test_transcripts_cut_at_every_character(transcript: Transcript) -> None:
    name, written, thoughts, text, calls = transcript
    for pieces in cuts(written):
        thought, said, called = read(form_of(name), pieces)
        assert (thought, said) == (thoughts, text), pieces
        assert [(one.name, json.loads(one.arguments)) for one in called] == calls, pieces


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda one: one[0])
def test_broken_calls_come_back_as_text(transcript: Transcript) -> None:
    """Cut off at any place, however it arrives: calls that are whole are there, and what was begun
    is text, with its marker.
    """
    name, written, _, _, calls = transcript
    form = form_of(name)
    assert form.calls is not None
    for end in range(len(written)):
        cut = written[:end]
        thought, text, called = read(form, [cut])
        assert read(form, list(cut)) == (thought, text, called), cut
        made = [(one.name, json.loads(one.arguments)) for one in called]
        assert made == calls[: len(made)], cut
        begun = [*regex.finditer(form.calls["open_pattern"], cut)]
        if begun and not thought.endswith(cut[begun[-1].start() :]):
            behind, close = cut[begun[-1].end() :], form.calls.get("close_pattern")
            ended = close is not None and regex.search(close, behind)
            if not ended and len(made) < len(begun):
                assert text.endswith(cut[begun[-1].start() :]), cut


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": NaN}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": "\\ud800"}}\n</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
        ("glm", "<tool_call>now"),
        ("qwen_xml", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\nnow\n</tool_call>"),
        ("glm", "<tool_call>now<arg_key>a</arg_key></tool_call>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{bad"),
        ("mistral", "[TOOL_CALLS][]"),
        ("deepseek", "<｜tool▁calls▁begin｜>now()<｜tool▁calls▁end｜>"),
        ("dsml", "<｜DSML｜function_calls>now<｜DSML｜x></｜DSML｜function_calls>"),
        ("kimi", "<|tool_calls_section_begin|>now<|tool_calls_section_end|>"),
        ("gemma", "<|tool_call>now{}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
        ("pythonic", "[now(a=)]"),
        ("list", "<|tool_call|>[]<|/tool_call|>"),
        ("harmony", "<|channel|>commentary to=functions.now json<|message|>{bad<|call|>"),
    ],
)
def test_what_is_no_call_stays_text(name: str, written: str) -> None:
    for pieces in ([f"a {written} b"], list(f"a {written} b")):
        form = form_of(name)
        if name == "pythonic":
            pieces = [piece.removeprefix("a ") for piece in pieces][: len(pieces)]
            pieces = ["".join(pieces).removeprefix("a ").removesuffix(" b")]
            assert read(form, pieces) == ("", written, [])
        else:
            assert read(form, pieces) == ("", f"a {written} b", [])


def test_thoughts_that_the_prompt_began() -> None:
    written = "\nStill thinking.\n</think>\n\nAnswer </think> here"
    for pieces in cuts(written):
        found = read(form_of("hermes"), pieces, thinking=True)
        assert found == ("Still thinking.", "Answer </think> here", [])


def test_where_no_tool_may_be_called_calls_are_text() -> None:
    written = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert read(form_of("hermes"), list(written), calling=False) == ("", written, [])


def test_only_the_first_call_where_there_may_be_one() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    parser = AnswerParser(form_of("hermes"), SCHEMAS, many=False)
    said = [*parser.push(call * 3), *parser.finish()]
    assert len(said) == 1 and said[0].call is not None


def test_text_comes_as_it_is_written() -> None:
    """Nothing is held back but what may become a marker, and that is short."""
    parser = AnswerParser(form_of("hermes"), SCHEMAS)
    assert [one.text for one in parser.push("Hello <b>")] == ["Hello <b>"]
    assert [one.text for one in parser.push(" a <tool")] == [" a"]
    assert [one.text for one in parser.push("box>")] == [" <toolbox>"]


def test_time_goes_with_the_length_of_an_answer() -> None:
    """Also where all of it may begin a marker, or is within one."""
    for written in ("\n" * 20_000, "<" * 20_000, "<tool_call>" + "a" * 20_000):
        parser, began = AnswerParser(form_of("hermes"), SCHEMAS), time.process_time()
        for character in written:
            list(parser.push(character))
        list(parser.finish())
        assert time.process_time() - began < 10


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_formats_are_told_by_their_templates(form: Format) -> None:
    if not form.signs:
        return
    template = "{{ tools }} " + " ".join(form.signs)
    assert detect(template).name == form.name
    assert format_of({"default": "x", "tool_use": template}, None, "auto").name == form.name
    assert format_of("x", None, form.name).name == form.name


def test_other_templates() -> None:
    assert detect("{{ messages }}") is NONE
    assert detect("{{ messages }} <think></think>").thoughts == THINK
    assert detect('{{ tools }} {"name": f, "parameters": p}').name == "llama"
    assert detect("{{ tools }} [TOOL_CALLS]").thoughts is None
    assert detect("{{ tools }} [TOOL_CALLS] [THINK] [/THINK]").thoughts == ("[THINK]", "[/THINK]")
    with pytest.raises(ConfigError, match="answer_format must be auto or one of harmony"):
        format_of("x", None, "unknown")


def test_a_checkpoints_own_response_template() -> None:
    own = {
        "start_anchor": "<assistant>",
        "fields": {
            "thinking": {"open": "<mull>", "close": "</mull>"},
            "tool_calls": {
                "open_pattern": r"<do (?P<name>\w+)>",
                "close": ["</do>", "<stop>"],
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {},
        },
    }
    form = format_of("{{ tools }}", own, "auto")
    written = f"<mull>hm</mull>Hi <do get_weather>{SMALL}</do><do now>{{}}<stop><do now>{{x</do>"
    expected = [Call(name="get_weather", arguments=SMALL), Call(name="now", arguments="{}")]
    for pieces in cuts(written):
        assert read(form, pieces) == ("hm", "Hi <do now>{x</do>", expected)


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("2", {"type": "integer"}, 2),
        ("2", {"type": "string"}, "2"),
        ("null", {"type": ["string", "null"]}, None),
        ("2", {"type": ["string", "null"]}, "2"),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("text", {}, "text"),
        ("[1]", None, [1]),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("2.0", {"type": "integer"}, 2.0),
    ],
)
def test_bare_values_have_the_tools_types(value: str, schema: Any, expected: Any) -> None:
    found = typed(value, "f", "x", {"f": {"properties": {"x": schema}}})
    assert found == expected and isinstance(found, type(expected))


# -- grammars --------------------------------------------------------------------------------------

END = 256
MARKERS = sorted(
    {marker for form in FORMATS for marker in form.shown() if marker != "｜DSML｜"} | {*THINK}
)
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [one.encode() for one in MARKERS]
SPECIAL = {marker: END + 1 + number for number, marker in enumerate(MARKERS)}
AS_SPECIAL = Vocabulary(TOKENS, special=SPECIAL.values(), ends=[END], encode=list)
AS_WORDS = Vocabulary(TOKENS, special=[], ends=[END], encode=list)
MASKS = Masks()


CLOSING = frozenset(b'"}])>\n/')
ENDS = ("</arg_value>", '<|"|>', "<escape>", "<|end|>", "<channel|>")


def write(matcher: Matcher, rng: Random, ends: set[bytes], most: int = 1500) -> str | None:
    """A random text that a grammar lets through, None where it does not end."""
    made: list[int] = []
    while len(made) < most:
        (row,) = MASKS.forbidden([(matcher, np.array(made, np.int32))])
        may = (~row).nonzero()[:, 0].tolist()
        assert may, bytes_of(made)
        if END in may and (len(may) == 1 or rng.random() < 0.7):
            return bytes_of(made).decode()
        may = [token for token in may if token != END]
        letters = [token for token in may if 97 <= token <= 122]
        closing = [token for token in may if token > END or token in CLOSING]
        if len(letters) == 26:
            # Within a text that anything may be part of: only what ends it.
            quoted = bytes_of(made).count(b'"') % 2
            closing = [token for token in may if (token == 34 if quoted else TOKENS[token] in ends)]
        made.append(rng.choice(closing if closing and rng.random() < 0.5 else letters or may))
    return None


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(TOKENS[token] for token in tokens)


@pytest.mark.parametrize("special", [True, False], ids=["special", "words"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_grammars_write_calls_and_nothing_else(form: Format, special: bool) -> None:
    form, rng, done = form_of(form.name), Random(5), 0
    vocabulary, known = (AS_SPECIAL, SPECIAL) if special else (AS_WORDS, {})
    ends = {one.encode() for one in {*ENDS} & {*form.shown()} | {*(form.thoughts or ())[1:]}}
    for thinking in (False, True):
        grammar = calls_grammar(form, SCHEMAS, Opening(special=known, thinking=thinking))
        for _ in range(5):
            written = write(Matcher(vocabulary, grammar), rng, ends)
            if written is None:
                continue
            done += 1
            started = thinking and form.thoughts is not None
            _, text, calls = read(form, [written], thinking=started)
            assert calls and not text.strip(), written
            for one in calls:
                jsonschema.validate(json.loads(one.arguments), SCHEMAS[one.name])
    assert done >= 3


@pytest.mark.parametrize("special", [True, False], ids=["special", "words"])
@pytest.mark.parametrize(
    "form",
    [form for form in FORMATS if form.name not in ("llama", "pythonic")],
    ids=lambda f: f.name,
)
def test_strict_tools_leave_text_free(form: Format, special: bool) -> None:
    """Any text goes through; behind the marker of a call only a call does."""
    form = form_of(form.name)
    vocabulary, known = (AS_SPECIAL, SPECIAL) if special else (AS_WORDS, {})
    grammar = calls_grammar(form, SCHEMAS, Opening(special=known, silent=True), free=True)
    harmony = form.name == "harmony"
    begin = "<|channel|>final<|message|>" if harmony else ""
    assert accepts(vocabulary, grammar, f"{begin}Just text, <b>bold</b> [1].")
    broken = {"harmony": "<|channel|>commentary to=functions.nothing"}.get(
        form.name, f"Hm. {form.markers[0]}nothing of the kind"
    )
    if form.name != "dsml":
        assert not lets_through(vocabulary, grammar, broken)


def tokens_of(text: str) -> list[int]:
    """Markers as their tokens, the rest as bytes."""
    made, at = [], 0
    while at < len(text):
        marker = next((one for one in MARKERS if text.startswith(one, at)), None)
        if marker is None:
            made += list(text[at].encode())
            at += 1
        else:
            made.append(SPECIAL[marker])
            at += len(marker)
    return made


def lets_through(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    return Matcher(vocabulary, grammar).follow(np.array(tokens_of(text), np.int32)) is not None


def accepts(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    return Matcher(vocabulary, grammar).accepts(np.array(tokens_of(text), np.int32))


def test_one_call_where_there_may_be_one() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for many in (True, False):
        grammar = calls_grammar(NAMED["hermes"], SCHEMAS, Opening(special={}), many=many)
        assert accepts(AS_WORDS, grammar, call)
        assert accepts(AS_WORDS, grammar, f"{call}\n{call}") == many


def test_thoughts_come_before_a_structure() -> None:
    form = form_of("hermes")
    assert around_body(NONE, Opening()) is None
    assert around_body(form, Opening(silent=True)) is None
    assert "@body" in str(around_body(form, Opening(thinking=True)))


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        ("glm", {"city": {"type": "string", "pattern": "a"}}, "pattern of city is not supported"),
        ("gemma", {"a": {"type": "array", "uniqueItems": True}}, "uniqueItems is not supported"),
        ("gemma", {"a": {"$ref": "#/nowhere"}}, "nowhere"),
    ],
)
def test_what_a_form_cannot_keep_is_named(name: str, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        calls_grammar(NAMED[name], {"f": {"properties": wanted}}, Opening(special=SPECIAL))
