"""What may become of a request that was accepted, and of an engine.

Owns the exceptions that clients of ``LLM`` and ``AsyncLLM`` see beside ``ConfigError`` and
``CapacityError``, which say that a request was wrong.
"""

from __future__ import annotations

from octavo.base import OctavoError


class QueueFullError(OctavoError):
    """As many requests wait as may. ``retry_after``: seconds after which trying again makes
    sense.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineClosedError(OctavoError):
    """The engine is shutting down: it takes nothing new, and what could not finish in time has been
    ended.
    """


class EngineDeadError(OctavoError):
    """The engine broke its own promises too often and has stopped; only a restart helps."""


class StepFailedError(OctavoError):
    """The step that computed this request crashed. The request is gone, the engine goes on."""


class RequestFailedError(OctavoError):
    """Something broke in octavo while it handled this request. The request is gone, the engine goes
    on.
    """


class InvalidNumbersError(OctavoError):
    """The model computed NaN or infinity for this request. The request is gone, and nothing of it
    is cached; the engine goes on.
    """
