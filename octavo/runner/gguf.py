"""Models from GGUF files: config and weights, dequantised by the ``gguf`` library.

Owns reading metadata without the vocabulary, and undoing what llama.cpp's converter did to names,
rows and norms, as the family's ``GGUFRules`` say. Tokenizers are the engine's business.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from octavo.base import ConfigError, UnsupportedError
from octavo.runner.weights import Progress, no_progress
from octavo.spec.family import Families, Family, GGUFRules, rename

ROWS_BYTES = 1 << 17
"""Quantised bytes that are made plain in one go."""


class LeanReader(GGUFReader):
    """A GGUFReader that steps over arrays of strings and numbers: their elements are the
    vocabulary, 262,144 objects each for Gemma, and cost many seconds to make. Array fields keep
    their length (the last part) and no content.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = self._get(orig_offs + 4, np.uint64)
        size = 12 + self._array_bytes(orig_offs + 12, item, int(length[0]))
        return size, [length], [0], [GGUFValueType.ARRAY, item]

    def _array_bytes(self, offset: int, item: GGUFValueType, count: int) -> int:
        scalar = self.gguf_scalar_to_np.get(item)
        if scalar is not None:
            return count * np.dtype(scalar).itemsize
        if item != GGUFValueType.STRING:
            raise UnsupportedError(f"a GGUF array of {item.name} is not supported")
        order = "<" if int(self._get(4, np.uint32, override_order="<")[0]) & 0xFFFF else ">"
        length, data, place = struct.Struct(f"{order}Q"), memoryview(self.data), offset
        for _ in range(count):
            place += 8 + length.unpack_from(data, place)[0]
        return place - offset


class GGUFModel:
    """One opened GGUF file of a family that octavo runs. Raises UnsupportedError for other
    architectures or metadata.
    """

    def __init__(self, path: str | Path, families: Families) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{self.path} does not exist; give a GGUF file")
        try:
            self.reader = LeanReader(self.path)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{self.path} is not a readable GGUF file: {error}") from error
        self.family: Family
        self.rules: GGUFRules
        self.family, self.rules = families.for_gguf(str(self._value("general.architecture")))

    def _value(self, key: str) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            raise ConfigError(f"{self.path} has no {key}")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """The config in upstream key names, for ``read_spec``. Special token ids are included where
        the file gives them.
        """
        prefix = f"{self.rules.architecture}."
        fields = self.reader.fields
        arrays = [
            name
            for name in fields
            if name.startswith(prefix) and fields[name].types[:1] == [GGUFValueType.ARRAY]
        ]
        if arrays:
            raise UnsupportedError(f"GGUF key {arrays[0]} differs by layer, which is not supported")
        metadata = {
            name.removeprefix(prefix): self._value(name)
            for name in fields
            if name.startswith(prefix)
        }
        shapes = {tensor.name: tensor.shape for tensor in self.reader.tensors}
        if "rope_freqs.weight" in shapes:
            raise UnsupportedError(
                "GGUF tensor rope_freqs.weight (scaled rotary frequencies) is not supported; use"
                " the safetensors checkpoint"
            )
        config = self.rules.config(metadata)
        config.setdefault("vocab_size", int(shapes["token_embd.weight"][1]))
        config["tie_word_embeddings"] = "output.weight" not in shapes
        for name in ("bos", "eos"):
            if f"tokenizer.ggml.{name}_token_id" in fields:
                config[f"{name}_token_id"] = int(self._value(f"tokenizer.ggml.{name}_token_id"))
        return config

    def weights(
        self, *, dtype: torch.dtype, progress: Progress = no_progress
    ) -> Iterator[tuple[str, Tensor]]:
        """All weights in ``dtype`` under module names, dequantised one at a time."""
        config = self.config()
        tensors = self.reader.tensors
        for done, tensor in enumerate(tensors):
            name = rename(tensor.name, self.rules.names)
            if name is None:
                raise UnsupportedError(
                    f"GGUF tensor {tensor.name} is not supported for architecture"
                    f" {self.rules.architecture}"
                )
            values = plain(tensor)
            values = np.require(self._undo(name, values, config), requirements=["C", "W"])
            yield name, torch.from_numpy(values).to(dtype)
            progress(done + 1, len(tensors))

    def _undo(self, name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
        for pattern, heads in self.rules.unpermute:
            if re.fullmatch(pattern, name):
                values = unpermute(values, int(config[heads]))
        if self.rules.minus_one and re.fullmatch(self.rules.minus_one, name):
            values = values - np.float32(1)
        return values


def plain(tensor: ReaderTensor) -> np.ndarray:
    """A tensor's values, float32.

    The library takes 16 rows at a time, and every one of numpy's steps on so few costs more than
    its work. Blocks do not depend on each other, so rows are joined until 16 of them have
    ``ROWS_BYTES``.
    """
    # Without the memory map's own class, whose every slice is a slow one.
    data = np.asarray(tensor.data).view(np.ndarray)
    rows, width = data.size // data.shape[-1], data.shape[-1] * data.itemsize
    joined = next(
        count
        for count in range(max(1, min(rows, ROWS_BYTES // (16 * width))), 0, -1)
        if rows % count == 0
    )
    values = dequantize(data.reshape(rows // joined, -1), tensor.tensor_type)
    return values.reshape(*data.shape[:-1], -1)


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k, pairs (i, i + D/2) of a head made neighbours. [heads *
    D, ...] -> the same.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
