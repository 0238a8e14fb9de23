"""Many engine streams as one, tied to a client: whoever hangs up ends what was being computed for
him.

Owns cancellation and server-sent events. Knows nothing of what is streamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from octavo.base import OctavoError
from octavo.server.errors import describe

T = TypeVar("T")
LOG = logging.getLogger("octavo.server")
DONE = "data: [DONE]\n\n"


def event(chunk: BaseModel) -> str:
    """One server-sent event."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up. Raises ClientDisconnect
    then.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(stream, item) as items come; nothing before every stream has given one, so that none is
    refused after that.

    The first error ends all. Closing this closes every stream.
    """
    pending = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    until = asyncio.FIRST_EXCEPTION
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=until)
            for task in done:
                task.result()
            until = asyncio.FIRST_COMPLETED
            for index, task in sorted((pending.pop(task), task) for task in done):
                if (item := task.result()) is not None:
                    pending[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, item
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


class EventStream(StreamingResponse):
    """Server-sent events: ``first``, the rest, and ``[DONE]``; or an error where one comes, and the
    end.
    """

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        self._chunks = _events(first, rest)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._chunks, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            with suppress(ClientDisconnect, OSError):
                await until_gone(receive, self.stream_response(send))


async def _events(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        try:
            yield first
            async for chunk in rest:
                yield chunk
            yield DONE
        except OctavoError as error:
            yield f"data: {describe(error).body()}\n\n"
        except Exception as error:
            LOG.exception("a stream ended with a mistake of the server")
            yield f"data: {describe(error).body()}\n\n"
