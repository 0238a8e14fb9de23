"""One server process: its socket, its signals, its end.

Owns graceful shutdown. On SIGTERM or SIGINT the engine takes nothing new (clients get 503), running
requests get their time, then connections are closed and the process ends; a second signal ends
their time. Knows uvicorn; knows no endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from octavo.base import ConfigError

if TYPE_CHECKING:
    from octavo.engine.aio import AsyncLLM

LOG = logging.getLogger("octavo.server")
FLUSH_SECONDS = 3
"""What slow readers get for the rest of their responses once the engine is closed."""

LINGER_SECONDS = 1
"""How long a server whose engine is dead still says so, before it goes."""

KEEP_ALIVE_SECONDS = 75
"""Idle connections stay longer than clients and proxies keep them (5 to 60 s, as a rule): of two
that hang up, the one who asks must be the first, or a request meets a connection that is being
closed and is lost.
"""


def bind(host: str, port: int) -> socket.socket:
    """A socket that is taken but does not listen yet. Raises ConfigError where the address cannot
    be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        taken.close()
        raise _unusable(host, port, error) from error
    return taken


def listen(taken: socket.socket) -> None:
    """Let connections come. Raises ConfigError where somebody who was bound to the same address
    listens already.
    """
    try:
        taken.listen()
    except OSError as error:
        host, port = taken.getsockname()[:2]
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: Exception) -> ConfigError:
    said = getattr(error, "strerror", None) or error
    return ConfigError(
        f"port {port} of {host} cannot be used: {said}; choose others with --host and --port"
    )


def url(taken: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = taken.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn that closes the engine before its connections, and ends where the engine breaks down.

    ready: called once requests are taken. failed: True once the engine has broken down.
    """

    def __init__(
        self, app: FastAPI, engine: AsyncLLM, *, shutdown_timeout: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=FLUSH_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._engine, self._timeout, self._ready = engine, shutdown_timeout, ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._watch = asyncio.ensure_future(self._end_with_engine())
        if self.started:
            self._ready()

    async def _end_with_engine(self) -> None:
        """Once the engine is dead, wait until clients know, and end; /health says 503 meanwhile."""
        await self._engine.until_dead()
        self.failed = True
        LOG.critical("the engine has stopped, and so does the server; start it again")
        await asyncio.sleep(LINGER_SECONDS)
        for _ in range(10 * (FLUSH_SECONDS - LINGER_SECONDS)):
            if not self.server_state.tasks:
                break
            await asyncio.sleep(0.1)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections."""
        if self._watch is not None:
            self._watch.cancel()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by signals. Not noted for uvicorn to raise again: an orderly end is no death by
        signal.
        """
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        timeout = self._timeout
        if self._closing is not None:
            self._closing.cancel()
            timeout = 0.0
        self._closing = asyncio.ensure_future(self._drain(timeout))

    async def _drain(self, timeout: float) -> None:
        try:
            await self._engine.close(timeout=timeout)
        except Exception:
            LOG.exception("the engine could not be closed")
        self.should_exit = True
