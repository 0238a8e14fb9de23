"""Traces: both formats of files, what is refused in them, which tokens are equal, and what an
unlimited cache would have of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from octavo.base import ConfigError
from octavo.sim.generate import GENERATORS, load_trace
from octavo.sim.traces import (
    History,
    Piece,
    TraceRequest,
    Vocabulary,
    align,
    count_tokens,
    read_trace,
)


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def mooncake(length: int, *ids: object, output: int = 3, timestamp: int = 0) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": list(ids),
    }


def test_mooncake_blocks_are_equal_where_their_ids_are(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        mooncake(20, 7, "x", 9),
        mooncake(12, 7, 3, timestamp=1500, output=0),
        mooncake(10, 7),
    )
    requests = read_trace(path, block_size=8)
    words = Vocabulary(requests)
    first, second, third = (words.tokens(request.prompt) for request in requests)
    assert [len(first), len(second), len(third)] == [20, 12, 10]
    assert (first[:8] == second[:8]).all() and (first[:8] == third[:8]).all()
    assert not set(first[8:].tolist()) & set(second[8:].tolist()), "other ids, other tokens"
    assert not set(third[8:].tolist()) & set(first.tolist()), "what no id tells is nobody else's"
    assert requests[1].arrival == 1.5
    assert requests[1].output_length == 1, "a request answers something"
    assert len(set(first.tolist())) == 20


def test_the_published_trace_is_read_as_it_was_described(tmp_path: Path) -> None:
    """Token i of block h is ``h * 512 + i`` where ids are numbered in order of appearance."""
    path = write(tmp_path / "trace.jsonl", mooncake(700, 0, 1), mooncake(1100, 0, 2, 3))
    requests = read_trace(path)
    words = Vocabulary(requests)
    assert words.tokens(requests[0].prompt).tolist() == list(range(700))


def test_aligned_prompts_are_whole_blocks_and_one_token_of_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl", mooncake(20, 1, 2, 3), mooncake(23, 1, 2, 4), mooncake(5, 6)
    )
    requests = align(read_trace(path, block_size=8), 8)
    words = Vocabulary(requests)
    first, second, short = (words.tokens(request.prompt) for request in requests)
    assert (len(first), len(second), len(short)) == (17, 17, 5)
    assert (first[:16] == second[:16]).all() and first[16] != second[16]
    (raw,) = align([TraceRequest(prompt=(np.arange(9, dtype=np.int32),), output_length=1)], 4)
    assert raw.prompt_length == 9 and len(raw.prompt) == 2


def test_own_format(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"tokens": [5, 6, 7], "output_tokens": [1, 2], "salt": "a", "priority": -1, "arrival": 0.5},
        {"segments": [["system", 4], ["me", 2]], "output_segments": [["said", 3]], "marks": [4]},
        {"segments": [["system", 6]], "output_length": 9},
    )
    tokens, segments, longer = read_trace(path)
    words = Vocabulary([tokens, segments, longer])
    assert words.tokens(tokens.prompt).tolist() == [5, 6, 7]
    assert words.answer(0, tokens).tolist() == [1, 2]
    assert (tokens.salt, tokens.priority, tokens.arrival) == ("a", -1, 0.5)
    assert segments.output_length == 3 and segments.marks == (4,)
    system = words.tokens(longer.prompt)
    assert words.tokens(segments.prompt)[:4].tolist() == system[:4].tolist()
    assert min(system.tolist()) > 7, "names take ids that no given token has"
    answers = words.answer(2, longer)
    assert len(answers) == 9 and not set(answers.tolist()) & set(system.tolist())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"line 2 is not JSON"),
        ("[1]", r"line 2 is no JSON object"),
        ('{"segments": [["a", 0]]}', r"line 2: segments must be pairs"),
        ('{"tokens": []}', r"line 2: tokens or segments must give a prompt"),
        ('{"output_length": 3}', r"line 2: tokens or segments must give a prompt"),
        ('{"tokens": [1.5]}', r"line 2: tokens must be token ids"),
        ('{"tokens": [1], "segments": []}', r"line 2: tokens and segments are both given"),
        ('{"tokens": [1], "output_tokens": [1], "output_length": 2}', r"output_length is 2"),
        ('{"tokens": [1], "output_length": 0}', r"output_length must be a whole number"),
        ('{"tokens": [1], "sallt": "a"}', r"line 2: sallt is not known; known: arrival,"),
        ('{"tokens": [1], "salt": 4}', r"line 2: salt must be a string"),
        ('{"tokens": [1], "arrival": "soon"}', r"line 2: arrival must be a number"),
        ('{"tokens": [1], "marks": [0]}', r"line 2: marks must be positions"),
        ('{"hash_ids": [1], "input_length": 0}', r"line 2: input_length must be a whole number"),
        ('{"hash_ids": 4, "input_length": 3}', r"line 2: hash_ids must be a list"),
        ('{"hash_ids": [[]], "input_length": 3}', r"line 2: hash_ids must hold numbers"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=complaint):
        read_trace(path)
    assert len(read_trace(path, limit=1)) == 1, "lines behind the limit are not read"


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(empty)
    binary = tmp_path / "trace.gz"
    binary.write_bytes(b"\x1f\x8b\xff\xff")
    with pytest.raises(ConfigError, match="not text"):
        read_trace(binary)


def test_more_tokens_than_ids_are_refused() -> None:
    requests = [TraceRequest(prompt=(("a", 1 << 30), ("b", 1 << 30)), output_length=1)]
    with pytest.raises(ConfigError, match="more than there are token ids"):
        Vocabulary(requests)


def random_requests(rng: Random, count: int) -> list[TraceRequest]:
    """Prompts that share beginnings, cut pieces short, and go on from each other's answers."""
    made: list[TraceRequest] = []
    for _ in range(count):
        pieces: list[Piece | np.ndarray] = []
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.3:
                run = [rng.randrange(2) for _ in range(rng.choice((16, 32, 40)))]
                pieces.append(np.array(run, np.int32))
            else:
                pieces.append((rng.choice("abc"), rng.choice((3, 8, 8, 16))))
        if made and rng.random() < 0.5:
            before = rng.choice(made)
            pieces = [*before.prompt, *(before.output or ()), *pieces]
        output = (("answer", len(made)), 5) if rng.random() < 0.5 else None
        made.append(
            TraceRequest(
                prompt=tuple(pieces),
                output_length=5,
                output=None if output is None else (output,),
                salt=rng.choice(("", "", "x")),
            )
        )
    return made


@pytest.mark.parametrize("seed", range(8))
def test_history_is_the_longest_common_beginning(seed: int) -> None:
    """Against all earlier requests token by token; runs of given tokens are told in sixteens."""
    requests = random_requests(Random(seed), 60)
    words, history = Vocabulary(requests), History()
    said: list[tuple[str, list[int]]] = []
    found = 0
    for request in requests:
        prompt = words.tokens(request.prompt).tolist()
        longest = 0
        for salt, tokens in said:
            if salt == request.salt:
                same = 0
                for ours, theirs in zip(prompt, tokens, strict=False):
                    if ours != theirs:
                        break
                    same += 1
                longest = max(longest, same)
        told = history.match(request)
        # What is cut elsewhere than before, or given in tokens, is told a little short.
        assert longest - 16 < told <= longest
        found += told == longest > 0
        history.add(request)
        answer = [] if request.output is None else words.tokens(request.output).tolist()
        said.append((request.salt, prompt + answer[:-1]))
    assert found > 15


# -- generators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_names_give_equal_requests(name: str) -> None:
    def told(text: str) -> list[tuple[object, ...]]:
        return [
            (each.prompt, each.output, each.output_length, each.arrival, each.salt)
            for each in load_trace(text)
        ]

    first = told(f"{name}:seed=3,requests=30")
    assert first == told(f"{name}:seed=3,requests=30") != told(f"{name}:seed=4,requests=30")
    assert len(first) == 30
    arrivals = [float(str(arrival)) for *_, arrival, _ in first]
    assert arrivals == sorted(arrivals) and arrivals[-1] > 5


@pytest.mark.parametrize("name", GENERATORS)
def test_traffic_has_something_in_common(name: str) -> None:
    history, common, total = History(), 0, 0
    requests = load_trace(f"{name}:requests=400")
    for request in requests:
        common += history.match(request)
        total += request.prompt_length
        history.add(request)
    assert 0.3 < common / total < 0.97, common / total
    assert len({request.salt for request in requests}) == (6 if name == "salts" else 1)


def test_conversations_go_on_from_what_was_answered() -> None:
    requests = load_trace("sessions:users=4,requests=60")
    answers = {request.output for request in requests if request.output}
    again = [r for r in requests if any(answer[0] in r.prompt for answer in answers)]
    assert len(again) > 30
    for request in requests:
        assert request.output is not None and count_tokens(request.output) == request.output_length


def test_options_scale_what_is_made() -> None:
    requests = load_trace("loops:documents=3,length=10,own=2,output=4,requests=9")
    assert [request.prompt[0] for request in requests[:3]] == [
        request.prompt[0] for request in requests[3:6]
    ]
    assert max(request.prompt_length for request in requests) <= 18
    assert len(load_trace("loops:requests=9", limit=4)) == 4


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no-such-file", r"no file and no generator; generators: uniform, zipf,"),
        ("zipf:color=3", r"zipf has no option 'color'; options: seed=0, requests=500,"),
        ("zipf:documents=0", r"documents must be a whole number from 1 on, not '0'"),
        ("zipf:documents=2.5", r"documents must be a whole number"),
        ("zipf:skew=-1", r"skew must be a number from 0 on"),
        ("zipf:rate=inf", r"rate must be a number"),
        ("zipf:seed", r"seed must be a whole number from 0 on, not ''"),
    ],
)
def test_a_wrong_name_is_explained(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_trace(name)
