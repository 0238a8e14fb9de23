"""Weights from safetensors checkpoints, by the module names of their family.

Owns finding the files, renaming, and complaints about what is missing or left over. GGUF files are ``runner/gguf.py``'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from octavo.base import ConfigError
from octavo.nn.decoder import Decoder
from octavo.spec.family import Family

Weights = Iterable[tuple[str, Tensor]]
"""(module name, tensor) pairs, made one at a time."""

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""


def no_progress(done: int, total: int) -> None:
    """Say nothing."""


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, or the one ``model.safetensors``. Raises ConfigError where none is."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} does not exist; octavo reads model.safetensors, sharded or whole")
    return files


def safetensors_weights(
    directory: str | Path, family: Family, *, dtype: torch.dtype, progress: Progress = no_progress
) -> Iterator[tuple[str, Tensor]]:
    """All weights of a checkpoint directory in ``dtype``, under module names."""
    files = safetensors_files(Path(directory))
    handles = [safe_open(file, framework="pt") for file in files]
    names = [(handle, name) for handle in handles for name in handle.keys()]  # noqa: SIM118
    for done, (handle, name) in enumerate(names):
        module = family.module_name(name)
        if module is not None:
            yield module, handle.get_tensor(name).to(dtype)
        progress(done + 1, len(names))


def fill(model: Decoder, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> None:
    """Put weights into a model built on the meta device.

    Raises ConfigError naming tensors that are missing, unknown, given twice or of a wrong shape; the model is then unusable.
    """
    wanted = dict(model.named_parameters())
    given: set[str] = set()
    for name, tensor in weights:
        if name in model.tied:
            continue
        if name not in wanted:
            raise ConfigError(
                f"tensor {name} of the checkpoint has no place in the model; the config and the weights do not match"
            )
        if name in given:
            raise ConfigError(f"tensor {name} is twice in the checkpoint")
        if tensor.shape != wanted[name].shape:
            raise ConfigError(f"tensor {name} has shape {tuple(tensor.shape)}, the config asks for {tuple(wanted[name].shape)}")
        given.add(name)
        owner, _, leaf = name.rpartition(".")
        placed = tensor.to(device=device, dtype=dtype)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(placed, requires_grad=False))
    missing = sorted(set(wanted) - given)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"the checkpoint lacks {', '.join(missing[:3])}{more}")
