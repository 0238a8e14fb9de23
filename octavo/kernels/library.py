"""Finds and loads the compiled kernels, and chooses the code that this machine can run.

Owns ``Library`` and the two environment variables. Knows no kernel: each has a file of its own,
which gets its function here.

``OCTAVO_KERNELS=0`` switches all kernels off. ``OCTAVO_CPU_ISA`` asks for an instruction set below
the machine's best.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from octavo.base import ConfigError
from octavo.kernels.sources import digest

PATH = Path(__file__).with_name("libkernels.so")
SOURCES = Path(__file__).with_name("csrc")

ISAS = ("portable", "avx2", "avx512", "avx512_bf16")
"""Instruction sets, each with all of those before it, as ``octavo_level`` counts them."""

EMULATED = "avx512_bf16_emulated"
"""The code of AVX512-BF16 with its one instruction written out. For tests on machines with AVX-512.
"""

TYPES = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})
"""Element types and their numbers in csrc/common.h."""


def type_number(dtype: torch.dtype) -> int | None:
    """A dtype's number in C, None for those that kernels do not take."""
    return TYPES.get(dtype)


class Library:
    """The kernels of one instruction set."""

    def __init__(self, loaded: ctypes.CDLL, isa: str) -> None:
        self.isa, self._loaded = isa, loaded

    @functools.cache  # noqa: B019
    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        """The exported function ``name``, which returns nothing, of these ctypes argument types.

        A kernel takes the address of a C struct. Those that run in every layer of every step get it
        as bytes of ``struct.pack``, which takes a fifth of the time that a ``ctypes.Structure``
        does.
        """
        found = self._loaded[f"octavo_{self.isa}_{name}"]
        found.restype, found.argtypes = None, arguments
        return found


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    reason = "it was not compiled when octavo was installed (that takes a C++17 compiler)"
    try:
        loaded = ctypes.CDLL(str(PATH))
    except OSError as error:
        reason = str(error) if PATH.exists() else reason
    else:
        # An installed wheel has no sources, and no way to differ from them.
        if not SOURCES.is_dir() or _made_of(loaded) == digest(SOURCES):
            return loaded
        reason = "it was compiled from other sources than these; install octavo again"
    warnings.warn(
        f"octavo's CPU kernels ({PATH.name}) cannot be used, torch runs instead: {reason}",
        stacklevel=2,
    )
    return None


def _made_of(loaded: ctypes.CDLL) -> str | None:
    if not hasattr(loaded, "octavo_sources"):
        return None
    loaded.octavo_sources.restype = ctypes.c_char_p
    return bytes(loaded.octavo_sources()).decode()


def levels() -> tuple[str, ...]:
    """Instruction sets that this machine can run, worst first; empty without the compiled library.
    Emulation comes last.
    """
    loaded = _loaded()
    if loaded is None:
        return ()
    best = loaded.octavo_level()
    return (*ISAS[: best + 1], *((EMULATED,) if best >= ISAS.index("avx512") else ()))


@functools.cache
def library(isa: str | None = None) -> Library | None:
    """The kernels of ``isa``, or of the best instruction set; None where they are switched off or
    not compiled.

    Raises ConfigError for an instruction set that does not exist or that this machine does not
    have.
    """
    if isa is None and os.environ.get("OCTAVO_KERNELS") == "0":
        return None
    possible = levels()
    if not possible:
        return None
    best = [name for name in possible if name != EMULATED][-1]
    asked = isa or os.environ.get("OCTAVO_CPU_ISA") or best
    if asked not in possible:
        raise ConfigError(f"OCTAVO_CPU_ISA is {asked!r}; this machine runs {', '.join(possible)}")
    loaded = _loaded()
    assert loaded is not None
    return Library(loaded, asked)


def available() -> bool:
    """True where kernels run in place of torch."""
    return library() is not None
