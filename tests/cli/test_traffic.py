"""``octavo sim --trace`` as a user types it: tables, JSON, the page, several runs at once, and what
is said of wrong input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.underway import StepUnderway
from octavo.cli.main import main

CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"
MODEL = str(CONFIGS / "gpt-oss-120b.json")
SMALL = "sessions:users=4,turns=4,system=100,own=40,output=12,requests=30"


def octavo(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    return int(ended.value.code or 0)


def sim(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert octavo(*arguments, "--json") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    """Three conversations, as the published traces tell them."""
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {
            "timestamp": 1000 * turn,
            "input_length": 512 * (2 + turn) + 100,
            "output_length": 20,
            "hash_ids": [0, *(10 * talk + block for block in range(1, 2 + turn)), 1000 + turn],
        }
        for turn in range(4)
        for talk in range(1, 4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_short_trace_with_every_access_checked(
    mooncake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a real model's layout, small enough to evict."""
    told = sim(
        capsys, "--trace", mooncake, "--config", MODEL, "--memory", "300MiB", "--align", "--check"
    )
    assert told["model"] == "gpt-oss-120b" and told["version"] == 1
    (run,) = told["runs"]
    assert run["requests"] == 12 and run["refused"] == 0
    assert run["checked_entries"] > 100_000 and run["evictions"] > 0
    assert 0 < run["hit_rate"] < run["possible_rate"]
    assert sum(miss["requests"] for miss in run["misses"].values()) == 12


def test_a_cache_that_is_wrong_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StepUnderway, "take_copies", lambda self: ())
    arguments = ("--trace", SMALL, "--config", MODEL, "--memory", "64MiB", "--check")
    assert octavo(*arguments) == 1
    assert "reads tokens" in capsys.readouterr().err


def test_several_sizes_at_once_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "hits.html"
    arguments = ["--trace", SMALL, "--config", MODEL, "--closed", "2", "--html", str(html)]
    for size in ("24MiB", "48MiB", "1GiB"):
        arguments += ["--memory", size]
    apart = sim(capsys, *arguments, "--processes", "2")
    assert [run["memory"] >> 20 for run in apart["runs"]] == [24, 48, 1024]
    rates = [run["hit_rate"] for run in apart["runs"]]
    assert rates == sorted(rates) and rates[0] < rates[2] <= apart["runs"][2]["possible_rate"]
    made = html.read_text()
    assert "gpt-oss-120b" in made and "48.0 MiB" in made and f"{rates[1]:.2%}" in made
    together = sim(capsys, *arguments, "--processes", "1")
    assert [run["hit_tokens"] for run in together["runs"]] == [
        run["hit_tokens"] for run in apart["runs"]
    ]


def test_tables_say_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", SMALL, "--config", MODEL, "--memory", "48MiB")
    (run,) = sim(capsys, *arguments)["runs"]
    assert octavo(*arguments) == 0
    shown = capsys.readouterr().out
    assert f"{run['hit_rate']:.2%}" in shown and f"{run['possible_rate']:.2%}" in shown
    assert "8 requests at once, 8,192 tokens a step at most" in shown
    for miss in run["misses"].values():
        assert f"{miss['tokens']:,}" in shown
    assert octavo(*arguments, "--open", "--speed", "4") == 0
    assert "4 times as fast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", SMALL], "give --config"),
        (["--memory", "1GiB"], "give --trace"),
        (["--trace", "nothing", "--config", MODEL], "no file and no generator"),
        (["--trace", SMALL, "--config", "nothing.json"], "nothing.json"),
        (["--trace", SMALL, "--config", MODEL, "--memory", "much"], "memory 'much' is not a size"),
        (["--trace", SMALL, "--config", MODEL, "--memory", "10KiB"], "none of the trace's 30"),
        (
            ["--trace", SMALL, "--config", MODEL, "--max-model-len", "9"],
            "are beyond max_model_len 9",
        ),
        (["--trace", SMALL, "--config", MODEL, "--eviction", "nru"], "there are worth, lru"),
        (["--trace", SMALL, "--config", MODEL, "--profile", "tpu"], "profile 'tpu'"),
        (["--trace", SMALL, "--config", MODEL, "--kv-dtype", "int3"], "int3"),
        (["--trace", SMALL, "--config", MODEL, "--html", "/no/such/place.html"], "html"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(*arguments) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err and shown.out == ""
    assert shown.err.count("\n") == 1
