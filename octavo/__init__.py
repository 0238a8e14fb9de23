"""octavo: long-context inference on a hybrid KV cache manager.

Owns the public names. ``LLM``, ``AsyncLLM`` and outputs are loaded when first touched, so that
``import octavo`` needs no torch; so is ``plan``, which never needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.base import CapacityError, ConfigError, OctavoError, UnsupportedError
from octavo.sched.sampling import SamplingParams
from octavo.sched.structured import StructuredOutputs

if TYPE_CHECKING:
    from octavo.engine.aio import AsyncLLM
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.plan.planner import plan

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "UnsupportedError",
    "__version__",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncLLM":
        return import_module("octavo.engine.aio").AsyncLLM
    if name == "LLM":
        return import_module("octavo.engine.llm").LLM
    if name in ("CompletionOutput", "RequestOutput"):
        return getattr(import_module("octavo.engine.outputs"), name)
    if name == "plan":
        # A package that can be called: it has this name, so nothing else can have it once it is
        # imported.
        return import_module("octavo.plan")
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
