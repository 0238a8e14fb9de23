"""Which backends there are, and which of them a model computes with.

Owns the finding: octavo's own, those that other packages install, and those of plugins; and the
environment variable by which somebody chooses. Knows no op.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from types import ModuleType

import torch

from octavo.base import ConfigError
from octavo.ops.cpu.backend import BACKEND as CPU
from octavo.ops.table import Backend, Ops, Place, bind_ops
from octavo.ops.torch.backend import BACKEND as PLAIN

BACKEND_GROUP = "octavo.backends"
"""Entry point group. An entry names a ``Backend``."""

CHOICE = "OCTAVO_OPS"
"""Environment variable: ``op=backend`` pairs with commas between them, such as ``attend=torch``."""


def find_backends(plugins: Iterable[ModuleType | str] = ()) -> tuple[Backend, ...]:
    """All backends, plain PyTorch first; of two that offer an op, the later one has it.

    plugins: modules or their names; ``BACKENDS`` of a module are backends or their paths,
        ``module:name``. Raises ConfigError where something else is found.
    """
    found: list[object] = [entry.load() for entry in entry_points(group=BACKEND_GROUP)]
    for plugin in plugins:
        module = importlib.import_module(plugin) if isinstance(plugin, str) else plugin
        found += [
            _at(one) if isinstance(one, str) else one for one in getattr(module, "BACKENDS", ())
        ]
    extra = [one for one in found if isinstance(one, Backend)]
    if len(extra) < len(found):
        wrong = next(one for one in found if not isinstance(one, Backend))
        raise ConfigError(f"{wrong!r} is offered as a backend and is none")
    return PLAIN, CPU, *extra


def _at(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def ops_for(
    device: torch.device,
    dtype: torch.dtype,
    *,
    backends: Iterable[Backend] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Ops:
    """The ops of a model that computes on ``device`` in ``dtype``, as ``OCTAVO_OPS`` asks.

    backends: those of ``find_backends`` unless given. Raises ConfigError where what is asked for is
        not there.
    """
    return bind_ops(
        Place(device=device, dtype=dtype),
        find_backends() if backends is None else backends,
        asked=read_choice(environment.get(CHOICE, "")),
    )


def read_choice(text: str) -> dict[str, str]:
    """``attend=torch,norm=torch`` as op -> backend. Raises ConfigError for anything else."""
    asked = {}
    for pair in filter(None, text.replace(" ", "").split(",")):
        op, equals, backend = pair.partition("=")
        if not (op and equals and backend):
            raise ConfigError(f"{CHOICE} has {pair!r}; write op=backend, such as attend=torch")
        asked[op] = backend
    return asked
