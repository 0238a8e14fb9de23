"""Tiny configs of state space models, alone and mixed with attention (Mamba, Jamba, Bamba and others), beyond what ``tests.tiny.BASE`` has."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

SPECS: MappingProxyType[str, dict[str, Any]] = MappingProxyType({})
