"""MODEL: directories, GGUF files and Hub ids; what is wrong is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.base import ConfigError
from octavo.engine.source import ModelSource, resolve


def model_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_directory_and_gguf(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m")
    assert resolve(str(directory)) == ModelSource(path=directory, gguf=False)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(file) == ModelSource(path=file, gguf=True)


@pytest.mark.parametrize(
    ("make", "model", "message"),
    [
        ((), "./nowhere", "does not exist"),
        ((), "nowhere.gguf", "does not exist"),
        ((), "one-word", "does not exist"),
        (("weights.bin",), "weights.bin", "not a .gguf"),
        (("m/x.gguf",), "m", "give that file itself"),
        (("m/config.json",), "m", "no \\*.safetensors"),
    ],
)
def test_wrong_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: tuple[str, ...], model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in make:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        resolve(model)


def test_hub_id_is_downloaded_without_other_weight_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, asked = model_directory(tmp_path / "snapshot"), []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name") == ModelSource(path=directory, gguf=False)
    assert asked[0][0] == "owner/name"
    assert not any("bin" in pattern or "gguf" in pattern for pattern in asked[0][1])


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="Hub cannot be reached: go online once"):
        resolve("owner/name")


def test_a_malformed_hub_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be fetched"):
        resolve("own er/name")
