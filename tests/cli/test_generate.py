"""``octavo generate`` on a tiny model with compressed entries: the report by kind of memory, as a
table and as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests import tiny
from tests.engine.test_text import BYTES

TEXT = "All sheets of one octavo are folded three times."
COUNT = 9
ROWS = (
    ("window", 1, ["v4_window", "v4_csa", "v4_hca"], 4),
    ("compressed", 4, ["v4_csa"], 2),
    ("index", 4, ["v4_csa"], 2),
    ("compressed", 16, ["v4_hca"], 1),
    ("compressor", 1, ["v4_csa"], 2),
    ("index_compressor", 1, ["v4_csa"], 2),
    ("compressor", 1, ["v4_hca"], 1),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.write("deepseek_v4", tmp_path_factory.mktemp("generate"))
    BYTES.backend.save_pretrained(directory)
    return directory


def generate(model: Path, *options: str) -> None:
    common = [
        "-p",
        TEXT,
        "-n",
        str(COUNT),
        "--ignore-eos",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--kv-memory",
        "16MiB",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(model), *common, "--max-model-len", "512", *options])
    assert not ended.value.code


def test_json_says_what_every_kind_of_memory_held(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(model, "--json", "--kv-cache-dtype", "fp8", "--indexer-cache-dtype", "fp4")
    made = json.loads(capsys.readouterr().out)
    held, report = made["cache_by_kind"], made["cache_report"]
    assert sum(each["bytes"] for each in held) == sum(group["bytes"] for group in report["groups"])
    assert (
        tuple(
            (each["stream"], each["stride"], each["kinds"], len(each["layers"]))
            for each in held[:-1]
        )
        == ROWS
    )
    tokens = len(BYTES.encode(TEXT)) + COUNT - 1
    assert report["tokens"] == tokens
    for each in held[:-1]:
        if each["law"] == "everything":
            assert each["entries"] == tokens // each["stride"]
    dtypes = {(each["stream"], each["stride"]): each["dtypes"] for each in held}
    assert dtypes["compressed", 4] == ["float8_e4m3fn", "bfloat16", "float8_e8m0fnu"]
    assert dtypes["index", 4] == ["float4_e2m1fn_x2", "float8_e8m0fnu"]
    assert dtypes["compressor", 1] == ["float32"]


def test_the_report_is_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(model, "--report")
    shown = capsys.readouterr().out
    assert "By what layers remember" in shown
    assert all(
        name in shown
        for name in (
            "compressed 1:4",
            "index 1:4",
            "index_compressor",
            "window",
            "padding",
            "share",
        )
    )
