"""Weights from safetensors checkpoints, by the module names of their family.

Owns finding the files, renaming, and complaints about what is missing or left over. GGUF files are
``runner/gguf.py``'s, other arrangements of weights ``runner/repack.py``'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from octavo.base import ConfigError
from octavo.nn.decoder import Decoder
from octavo.runner.blocks import Block, are_scales, read
from octavo.runner.mxfp4 import dequantise
from octavo.runner.repack import Piece, pieces
from octavo.spec.family import Family

Weights = Iterable[tuple[str, Tensor]]
"""(module name, tensor) pairs, made one at a time."""

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""


def no_progress(done: int, total: int) -> None:
    """Say nothing."""


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, or the one ``model.safetensors``. Raises
    ConfigError where none is.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist; octavo reads model.safetensors, sharded or whole"
            )
    return files


def safetensors_weights(
    directory: str | Path,
    family: Family,
    *,
    block: Block = (128, 128),
    progress: Progress = no_progress,
) -> Iterator[tuple[str, Tensor]]:
    """All weights of a checkpoint directory under module names, in their stored dtype; quantised
    ones as floats.

    block: rows and columns of fp8 weights that share a scale. Fused MXFP4 experts come as
    ``[experts, inputs, outputs]``, the arrangement that Transformers has for them where they are
    not quantised.
    """
    files = safetensors_files(Path(directory))
    handles = [safe_open(file, framework="pt") for file in files]
    names = [(handle, name) for handle in handles for name in handle.keys()]  # noqa: SIM118
    where = {name: handle for handle, name in names}
    packed = "mxfp4" in family.quantised
    for done, (_, name) in enumerate(names):
        module = family.module_name(name)
        if (
            packed
            and name.endswith("_scales")
            and f"{name.removesuffix('_scales')}_blocks" in where
        ):
            module = None
        if module is not None and not are_scales(name, where):
            tensor, scales = read(name, where, block), f"{name.removesuffix('_blocks')}_scales"
            if packed and name.endswith("_blocks") and scales in where:
                module, tensor = (
                    module.removesuffix("_blocks"),
                    dequantise(tensor, where[scales].get_tensor(scales)).mT,
                )
            yield module, tensor
        progress(done + 1, len(names))


class _Places:
    """The weights of a model on the meta device, as they are given, whole or in parts, in the dtype
    of each.
    """

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self.model, self.device = model, device
        self.wanted = dict(model.named_parameters())
        self.shapes = {name: weight.shape for name, weight in self.wanted.items()}
        self._given: set[tuple[str, object]] = set()
        self._open = {name: weight.numel() for name, weight in self.wanted.items()}

    def put(self, name: str, piece: Piece) -> None:
        """Place what the tensor ``name`` has for one weight."""
        weight, shape = piece.weight, self.shapes.get(piece.weight)
        if shape is None or any(
            stop > size for (_, stop), size in zip(piece.region, shape, strict=False)
        ):
            raise ConfigError(
                f"tensor {name} of the checkpoint has no place in the model; the config and the"
                " weights do not match"
            )
        asked = (*(stop - start for start, stop in piece.region), *shape[len(piece.region) :])
        if piece.values.shape != asked:
            raise ConfigError(
                f"tensor {name} has shape {tuple(piece.values.shape)}, the config asks for {asked}"
            )
        self._open[weight] -= prod(asked)
        if (weight, piece.region) in self._given or self._open[weight] < 0:
            raise ConfigError(f"tensor {name} is twice in the checkpoint")
        self._given.add((weight, piece.region))
        owner, _, leaf = weight.rpartition(".")
        module, dtype = self.model.get_submodule(owner), self.wanted[weight].dtype
        if not piece.region:
            self._set(module, leaf, piece.values.to(device=self.device, dtype=dtype).contiguous())
            return
        if getattr(module, leaf).is_meta:
            self._set(module, leaf, torch.empty(shape, device=self.device, dtype=dtype))
        getattr(module, leaf)[tuple(slice(*interval) for interval in piece.region)] = piece.values

    @staticmethod
    def _set(module: nn.Module, leaf: str, values: Tensor) -> None:
        setattr(module, leaf, nn.Parameter(values, requires_grad=False))

    def check(self) -> None:
        """Raise ConfigError naming weights that were not given, or not all of them."""
        missing = sorted(name for name, elements in self._open.items() if elements)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(f"the checkpoint lacks {', '.join(missing[:3])}{more}")


def fill(model: Decoder, weights: Weights, *, family: Family, device: torch.device) -> None:
    """Put weights into a model built on the meta device, in the dtypes that it was built with.

    Raises ConfigError naming tensors that are missing, unknown, given twice, of a wrong shape or
    tied to what they differ from; the model is then unusable.
    """
    places, repeated = _Places(model, device), dict[str, Tensor]()
    for name, tensor in weights:
        if name in model.tied:
            repeated[name] = tensor
            continue
        if name in model.unused:
            continue
        draft = re.fullmatch(family.drafts, name) if family.drafts else None
        if draft and int(draft[1]) >= len(model.model.layers):
            continue
        for piece in pieces(name, tensor, family.repack, places.shapes):
            places.put(name, piece)
    places.check()
    for name, tensor in repeated.items():
        # Which of two different ones is right, the config's or the checkpoint's, nobody can tell
        # from here.
        weight = model.get_parameter(model.tied[name])
        if not torch.equal(tensor.to(device=device, dtype=weight.dtype), weight):
            raise ConfigError(
                f"{name} of the checkpoint is not {model.tied[name]}, which tie_word_embeddings"
                " says; set it to false in config.json to use both"
            )
