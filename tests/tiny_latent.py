"""Tiny configs of latent attention, dense and sparse (DeepSeek-V2, V3, V3.2, GLM-5), beyond what ``tests.tiny.BASE`` has."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType({})
