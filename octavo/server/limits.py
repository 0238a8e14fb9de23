"""What is refused before anyone reads it: requests without the key, and bodies beyond the limit.

Owns two ASGI middlewares. They know headers and bytes only.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import Failure

OPEN_PATHS = frozenset({"/", "/health"})
"""Asked by browsers and load balancers, which have no key. Neither tells anything about requests.
"""


class ApiKey:
    """Lets nobody in without ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        failure = Failure(
            status=401,
            message="this server needs its API key, sent as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await failure.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # In constant time: how long it takes must not tell how much of a guess is right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class BodyLimit:
    """Refuses bodies of more than ``max_bytes``, whether or not they say their length."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._declared(scope) > self._max_bytes:
            failure = Failure(
                status=413,
                message=self._message,
                code="request_too_large",
                headers={"connection": "close"},
            )
            await failure.response()(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise HTTPException(413, self._message, {"connection": "close"})
            return message

        await self._app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"the body is larger than this server's limit of {self._max_bytes} bytes"

    def _declared(self, scope: Scope) -> int:
        try:
            return int(Headers(scope=scope).get("content-length", "0"))
        except ValueError:
            return 0
