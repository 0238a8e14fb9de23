"""Where tokens meet bytes: block sizes for every group, and the arena they are cut from.

Owns ``CacheLayout``, the device profiles and the choice of ``block_tokens``. Knows laws and byte counts; knows no kinds and no
requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.memory.layout import ArenaLayout
from octavo.spec.group import Group, PageFormat


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One group with its block size decided.

    fixed, turning: table columns of one request (``Group.table_columns``); fixed is None where blocks are never let go.
    """

    group: Group
    format: PageFormat
    bucket: int
    page_units: int
    fixed: int | None
    turning: int

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.format.block_tokens


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything the cache manager, the planner and the runner must agree on."""

    groups: tuple[GroupLayout, ...]
    arena: ArenaLayout
    hash_unit: int
    max_model_len: int
