"""Words and arithmetic everybody shares: units, intervals, errors.

Owns the one converter between tokens and blocks. Knows nothing of models, bytes on a device, or
requests.

Units, used as names rather than types because all of them are plain integers in numpy arrays:
``tokens`` (positions, 0-based; *n tokens are computed* means tokens ``[0, n)``), ``blocks``
(``block_tokens`` tokens of one group), ``bytes``, and ``units`` (the granule of arena addresses; a
page *is* its unit offset).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import gcd
from types import TracebackType

Interval = tuple[int, int]
"""Half-open token interval ``[start, stop)``."""

NO_PAGE = -1
"""Stands in a table or index where no page is."""


class OctavoError(Exception):
    """Base of everything octavo raises on purpose."""


class UnsupportedError(OctavoError):
    """A model or option that octavo knows it cannot run. The message names the field and what is
    missing.
    """


class ConfigError(OctavoError, ValueError):
    """An argument or file is wrong. The message names the argument and the fix."""


class CapacityError(OctavoError):
    """A request that can never fit. The message carries the arithmetic."""


class Handling:
    """While the block runs, one request is being handled: what is raised in it is about that
    request, as ``handled`` tells. Of nested blocks the innermost names it.
    """

    __slots__ = ("_request_id",)

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            note_handled(error, self._request_id)


def note_handled(error: BaseException, request_id: str) -> None:
    """Say which request was being handled when an error was raised, unless somebody has said so."""
    if handled(error) is None:
        # An exception of C code may take no attributes; then nobody is named.
        with suppress(AttributeError, TypeError):
            error.octavo_request_id = request_id  # type: ignore[attr-defined]


def handled(error: BaseException) -> str | None:
    """Id of the request that was being handled when an error was raised, None where nobody said."""
    return getattr(error, "octavo_request_id", None)


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor`` rounded up."""
    return -(-value // divisor)


def floor_to(value: int, multiple: int) -> int:
    """The largest multiple of ``multiple`` that is at most ``value``."""
    return value - value % multiple


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return ceil_div(value, multiple) * multiple


def block_range(interval: Interval, block_tokens: int) -> range:
    """Blocks that hold any token of ``interval``: the tokens-to-blocks converter."""
    start, stop = interval
    if stop <= start:
        return range(0)
    return range(start // block_tokens, ceil_div(stop, block_tokens))


def blocks_of(intervals: Iterable[Interval], block_tokens: int) -> list[int]:
    """Blocks that hold any token of any interval, ascending and without repeats."""
    return sorted(
        {block for interval in intervals for block in block_range(interval, block_tokens)}
    )


def most_blocks(tokens: int, block_tokens: int, alignment: int = 1) -> int:
    """Most blocks that ``tokens`` consecutive tokens can touch when their first is a multiple of
    ``alignment``.
    """
    if tokens <= 0:
        return 0
    return ceil_div(block_tokens - gcd(alignment, block_tokens) + tokens, block_tokens)
