"""What a model's caches cost, what fits, and why: from a config alone, with the allocator's own
code.

Owns nothing itself: the package is callable, so that ``octavo.plan(config)`` plans (see
``planner.plan``) although the name is also that of this package.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is called like its main function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from octavo.plan.planner import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _Callable
