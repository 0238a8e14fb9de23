"""Layer kinds, one folder each: what a layer remembers (``spec.py``), how it computes, and the slow
oracle of it.

Owns finding them. Importing this package or any ``spec.py`` needs no torch.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from octavo.spec.kind import Kind


def find_kinds() -> tuple[type[Kind], ...]:
    """Every kind in this package, by name of its folder."""
    found: list[type[Kind]] = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        if not info.ispkg:
            continue
        module = importlib.import_module(f"{__name__}.{info.name}.spec")
        found += [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Kind)
            and value.__module__ == module.__name__
        ]
    return tuple(found)
