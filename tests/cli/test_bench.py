"""``octavo bench``: what it asks for, what it counts, and that its figures agree with each
other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.base import ConfigError
from octavo.cli.bench import Load, prompts, quantiles
from octavo.cli.main import main
from tests import tiny


def test_prompts_share_what_they_are_told_to_and_differ_between_runs() -> None:
    load = Load(requests=3, input_len=20, shared_len=8)
    first, second = prompts(load, 0, 300), prompts(load, 1, 300)
    assert {len(prompt) for prompt in first + second} == {20}
    assert len({tuple(prompt[:8]) for prompt in first + second}) == 1
    assert len({tuple(prompt[8:]) for prompt in first + second}) == 6
    assert first == prompts(load, 0, 300)


def test_quantiles_are_values_that_occur() -> None:
    assert quantiles([0.004, 0.001, 0.002, 0.003]) == {"p50": 3.0, "p90": 4.0, "p99": 4.0}


@pytest.mark.parametrize(
    ("name", "value"), [("requests", 0), ("rate", -1.0), ("shared_len", 600), ("runs", 0)]
)
def test_wrong_values_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Load(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [["--concurrency", "2"], ["--rate", "200"]])
def test_a_tiny_model_is_measured(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = str(tiny.write("llama", tmp_path)), tmp_path / "out.json"
    sizes = ["--requests=4", "--input-len=40", "--output-len=5", "--shared-len=32", "--runs=2"]
    sizes += ["--kv-memory=8MiB", "--max-model-len=128"]
    with pytest.raises(SystemExit) as done:
        main(["bench", model, *how, *sizes, "--json", "-o", str(file)])
    assert done.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(file.read_text())
    assert report["environment"]["cpu"] and report["environment"]["versions"]["torch"]
    assert len(report["runs"]) == 2
    for run in report["runs"]:
        assert run["output_tokens_per_s"] * run["seconds"] == pytest.approx(20)
        assert run["prompt_tokens_per_s"] * run["seconds"] == pytest.approx(160)
        assert 0 < run["first_token_ms"]["p50"] <= run["request_ms"]["p50"] <= 1000 * run["seconds"]
        assert run["cached_prompt_tokens"] % 16 == 0
    assert report["runs"][1]["cached_prompt_tokens"] == 4 * 32
