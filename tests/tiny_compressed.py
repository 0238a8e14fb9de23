"""Tiny configs of compressed attention (DeepSeek-V4), beyond what ``tests.tiny.BASE`` has."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType({})
