"""``octavo plan`` and ``octavo explain``: tables, JSON, the page, and one line with exit code 2 for
wrong input.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.cli.main import main
from octavo.plan.explain import examples
from tests.plan.configs import CONFIGS, NAMES, path_of

ROOT = CONFIGS.parents[2]


def octavo(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_tables_say_what_people_ask(capsys: pytest.CaptureFixture[str]) -> None:
    name = str(path_of("gemma-3-27b"))
    assert (
        octavo(
            "plan",
            name,
            "--context",
            "32768",
            "--vs",
            "uniform",
            "--vs",
            "vllm",
            "--mix",
            "4096:3,32768:1",
        )
        == 0
    )
    shown = capsys.readouterr().out
    for words in (
        "window 1024",
        "sliding_window=1024",
        "fit",
        "81,920 B",
        "7.64",
        "holds 24",
        "75% of 4,096",
        "resume point",
    ):
        assert words in shown, words
    assert octavo("plan", name, "--layers") == 0
    assert capsys.readouterr().out.count("kv: 8,192 B per token") == 62


def test_json_is_one_object_or_one_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("plan", str(path_of("llama-3.2-1b")), "--json", "--lengths", "1000,2000") == 0
    one = json.loads(capsys.readouterr().out)
    assert set(one["bytes_at"]) == {"1000", "2000", str(one["context"])}
    assert octavo("plan", str(path_of("llama-3.2-1b")), str(path_of("gemma-3-270m")), "--json") == 0
    several = json.loads(capsys.readouterr().out)
    assert [each["model"] for each in several["plans"]] == ["llama-3.2-1b", "gemma-3-270m"]


def test_models_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    pair = [str(path_of(name)) for name in ("deepseek-v4-pro", "deepseek-v3.2")]
    assert octavo("plan", *pair, "--context", "1048576", "--max-model-len", "1048576") == 0
    shown = capsys.readouterr().out
    assert "9.617 GiB" in shown and "83.875 GiB" in shown and "8.72" in shown


@pytest.mark.parametrize(
    "name", ["gemma-4-e4b", "deepseek-v4-flash", "nemotron-h-8b", "falcon-mamba-7b"]
)
def test_the_page_needs_nothing_else(name: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert octavo("plan", str(path_of(name)), "--html", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|@import|https?://|url\(|src=", text)
    pictures = [
        ElementTree.fromstring(part) for part in re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    ]
    layer_map, areas = pictures
    assert len(layer_map.findall("g")) == len(json_of(name)["layers"])
    assert len(areas.findall("polygon")) == len(json_of(name)["curves"])
    assert octavo("plan", str(path_of(name)), "--html", str(tmp_path / "no" / "where.html")) == 2


def json_of(name: str) -> dict[str, object]:
    from octavo.plan.planner import plan

    return plan(path_of(name)).to_json()


def test_explain_answers_what_people_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("explain", str(path_of("deepseek-v3.2"))) == 0
    shown = capsys.readouterr().out
    assert (
        "this is MLA" in shown
        and "sparse attention (DSA)" in shown
        and "Does it need a KV cache? Yes, and it grows" in shown
    )
    assert octavo("explain", str(path_of("nemotron-h-8b"))) == 0
    shown = capsys.readouterr().out
    assert (
        "No: a state of one size" in shown
        and "No: it mixes no tokens" in shown
        and "not MLA" in shown
    )
    assert octavo("explain", str(path_of("gemma-3n-e4b"))) == 0
    assert "None of its own: it reads the cache of layer" in capsys.readouterr().out


def test_worked_examples_have_the_known_numbers() -> None:
    text = examples()
    for number in (
        "1,000,000 entries",
        "40,960 entries",
        "1,040,960 entries and 10 states",
        "262,144 entries",
        "8,192 entries",
        "window: 128 entries",
    ):
        assert number in text, number


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("explain", str(path_of(name))) == 0
    assert "Does it need a KV cache?" in capsys.readouterr().out


BROKEN = {
    "missing.json": None,
    "broken.json": "{",
    "list.json": "[]",
    "window0.json": {"sliding_window": 0},
    "short.json": {"layer_types": ["full_attention"]},
    "strange.json": {"model_type": "dreamformer"},
    "headless.json": {"num_key_value_heads": 0},
}


@pytest.mark.parametrize("file", BROKEN)
def test_a_wrong_file_is_one_line(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = BROKEN[file]
    if isinstance(content, dict):
        config = json.loads(path_of("gemma-3-270m").read_text(encoding="utf-8"))
        content = json.dumps({**config, **content})
    if content is not None:
        (tmp_path / file).write_text(content, encoding="utf-8")
    for command in ("plan", "explain"):
        assert octavo(command, str(tmp_path / file)) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("octavo:"), (
            shown
        )


@pytest.mark.parametrize(
    "options",
    [
        ("--memory", "-5GiB"),
        ("--kv-dtype", "int3"),
        ("--tp", "3"),
        ("--context", "0"),
        ("--lengths", "4k"),
        ("--mix", "9:x"),
        ("--gpu", "abacus"),
        ("--vs", "paper"),
        ("--profile", "tpu"),
        ("--requests", "-1"),
    ],
)
def test_wrong_options_are_one_line(
    options: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo("plan", str(path_of("llama-3.1-8b")), *options) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("octavo:")


def test_the_command_imports_no_torch() -> None:
    code = (
        "import sys\nfrom octavo.cli.main import main\n"
        f"try: main(['plan', {str(path_of('gemma-3-27b'))!r}, '--json'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "gemma-3-27b"
