"""The command line: exit codes, one line for wrong input, JSON where people script."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from rich.console import Console

from octavo import __version__
from octavo.base import ConfigError
from octavo.cache.report import CacheReport, GroupReport
from octavo.cli import demo
from octavo.cli import sim as sim_command
from octavo.cli.main import main
from octavo.cli.report import notes, table
from octavo.config import format_size
from octavo.sim import world

ROOT = Path(__file__).resolve().parents[2]


def octavo(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "./nowhere", "-p", "x"], "does not exist"),
        (
            ["generate", "./nowhere", "-p", "x", "--temperature", "-1"],
            "temperature must be at least 0",
        ),
        (["generate", "./nowhere", "-p", "x", "-n", "-1"], "max_tokens must be at least 0"),
        (
            ["generate", "./nowhere", "-p", "x", "--kv-memory", "lots"],
            "kv_memory 'lots' is not a size",
        ),
        (["generate", "./nowhere", "-p", "x", "--dtype", "int3"], "dtype must be one of"),
        (["sim", "--model", "nothing"], "nothing"),
        (["sim", "--count", "many"], "'--count'"),
        (["generate", "./nowhere"], "'--prompt' / '-p'; see octavo generate --help"),
        (["generate", "./nowhere", "--promt", "x"], "No such option"),
        (["pln"], "No such command 'pln'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "m"], ["nonsense"], ["sim", "--count", "0"]]
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_sim_prints_json_and_is_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    digests = []
    for _ in range(2):
        assert octavo(["sim", "--seed", "3", "--steps", "30", "--json"]) == 0
        (report,) = json.loads(capsys.readouterr().out)
        assert report["seed"] == 3
        digests.append(report["digest"])
    assert digests[0] == digests[1]


def test_sim_counts_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo(["sim", "--seed", "5", "--count", "3", "--steps", "20"]) == 0
    assert capsys.readouterr().out.startswith("3 seeds clean: ")


def test_a_failing_seed_is_exit_code_1_and_says_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> world.SimReport:
        raise world.SimulationError("wrong\nreplay: octavo sim --seed 4 --steps 9")

    monkeypatch.setattr(world, "run", fail)
    with pytest.raises(typer.Exit) as ended:
        sim_command.run(first=4, count=1, steps=9, model=None, json=False)
    assert ended.value.exit_code == 1
    assert "octavo sim --seed 4 --steps 9" in capsys.readouterr().err


def test_demo_without_its_weights_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(ConfigError, match="make demo"):
        demo.weights()


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"octavo {__version__}\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


def test_the_report_puts_what_was_held_beside_a_uniform_cache() -> None:
    window = GroupReport(
        law="window 512",
        layers=(0, 1, 2),
        block_tokens=64,
        blocks=9,
        bytes=3 << 20,
        uniform_bytes=9 << 20,
    )
    growing = GroupReport(
        law="everything",
        layers=(3,),
        block_tokens=32,
        blocks=41,
        bytes=3 << 20,
        uniform_bytes=3 << 20,
    )
    report = CacheReport(
        tokens=1300, cached_tokens=16, groups=(window, growing), peak_bytes=7 << 20
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(report))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["3", "window", "512", "9", "×", "64", "3.0", "MiB", "9.0", "MiB"] in lines
    assert ["all", "6.0", "MiB", "12.0", "MiB"] in lines
    assert (
        notes(report, 100)
        == "50% less than one uniform cache; at most 7.0 MiB held at any step\n16 of 100 prompt"
        " tokens came from the prefix cache"
    )
    short = CacheReport(tokens=3, cached_tokens=0, groups=(growing,), peak_bytes=3 << 20)
    assert notes(short, 3).startswith("no less than one uniform cache")
