"""Tiny configs of linear attention, delta nets and other recurrences (Qwen3-Next, MiniMax, Kimi-Linear and others), beyond what ``tests.tiny.BASE`` has."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType({})
