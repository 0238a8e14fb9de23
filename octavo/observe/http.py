"""Counts responses, those that were refused before any endpoint saw them included.

Owns one ASGI middleware. Knows paths and statuses only.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.observe.metrics import Metrics

UNKNOWN = "other"
"""Path of what led nowhere: paths that clients make up must not become labels."""


class CountResponses:
    """Tells ``Metrics`` of every response as it begins."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.responded(_path(scope), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            # Whoever is outside of this will answer for the mistake.
            if not begun:
                self._metrics.responded(_path(scope), 500)
            raise


def _path(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", UNKNOWN)
