"""From what a user calls a model to files on disk.

Owns ``ModelSource``, where octavo keeps files of its own, and the one place that may use the
network. Knows file names; reads no weights and no config.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from octavo.base import ConfigError

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
"""What is fetched of a Hub repository: weights as safetensors, configs and the tokenizer; no other
weight formats.
"""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Files of one model. ``path`` is a directory with safetensors, or one GGUF file where ``gguf``
    is true.
    """

    path: Path
    gguf: bool


def cache_home() -> Path:
    """Where octavo keeps what it can make again: ``$XDG_CACHE_HOME/octavo``, by default
    ``~/.cache/octavo``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def dump_folder(dump_dir: str) -> Path | None:
    """Where dumps go: the folder asked for; for ``auto`` ``$XDG_STATE_HOME/octavo/dumps``, by
    default ``~/.local/state/octavo/dumps``; None for ``none``.
    """
    if dump_dir == "none":
        return None
    if dump_dir != "auto":
        return Path(dump_dir)
    home = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(home) / "octavo" / "dumps"


def resolve(model: str | Path) -> ModelSource:
    """Find the files of ``model``: a local directory, a ``.gguf`` file, or a Hub id, which is
    downloaded once.

    Raises ConfigError saying what was looked for and what to do.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                f"{path} is a file but not a .gguf; give a .gguf file or the directory around the"
                " safetensors"
            )
        return ModelSource(path=path, gguf=True)
    if path.is_dir():
        return ModelSource(path=_checked(path, str(path)), gguf=False)
    if _looks_local(str(model)):
        raise ConfigError(
            f"{model} does not exist; give a model directory, a .gguf file or a Hub id such as"
            " google/gemma-3-270m"
        )
    return ModelSource(path=_checked(_download(str(model)), str(model)), gguf=False)


def _looks_local(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or model.lower().endswith(".gguf")
        or model.count("/") != 1
        or "\\" in model
    )


def _checked(path: Path, model: str) -> Path:
    if not (path / "config.json").is_file():
        inside = [file.name for file in sorted(path.glob("*.gguf"))]
        hint = f"; it holds {', '.join(inside)}: give that file itself" if inside else ""
        raise ConfigError(f"{model} has no config.json{hint}")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{model} has no *.safetensors; octavo reads safetensors and GGUF weights"
        )
    return path


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise ConfigError(
            f"{model} is gated: accept its terms on the Hub, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model} is neither a local path nor a model on the Hub (private ones need `hf auth"
            " login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{model} is not a local path, not in the Hub cache, and the Hub cannot be reached: "
            "go online once, or give a local directory or .gguf file"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model} cannot be fetched from the Hub: {str(error).splitlines()[0]}"
        ) from error
