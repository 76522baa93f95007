"""Running a server: it listens, drains at the first SIGTERM or Ctrl-C, and ends what runs at the second."""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..engine import AsyncLLM
from .app import create_app
from .connections import most_connections, protocol
from .service import Service
from .settings import ServeSettings

log = logging.getLogger("torch_infini")
ACCEPTED = 16  # connections between two looks at what else there is to do
QUEUED = 2048  # connections that wait in the kernel to be accepted
GRACE = 1  # seconds that responses have to be written after the last request ended


class Server(uvicorn.Server):
    """uvicorn's server, with a signal handler that lets running requests finish while it refuses new ones.

    uvicorn's own stops listening first, so that new requests would meet a closed port instead of a 503, and raises the
    signal again behind the end, so that the exit status would not be 0.

    Args:
        service: What it serves.
        config: Of uvicorn.
    """

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service
        self._end: float | None = None  # when what still runs is ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio takes its backlog as the number to accept in one go, and a thousand connections take 0.15 s.
        for listener in sockets or ():
            listener.listen(QUEUED)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._end is None:
            self.drain()
        elif self._end > time.monotonic():
            self._end = time.monotonic()
        else:
            self.force_exit = self.should_exit = True

    def drain(self) -> None:
        """Refuse new requests; end when those that run are finished, at the latest after the settings' seconds."""
        self._service.drain()
        self._end = time.monotonic() + self._service.settings.drain
        log.warning("draining: %d samples are running or waiting", self._service.in_flight)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn calls this ten times a second."""
        # uvicorn's tasks are responses: what is computed may yet have to be sent.
        is_idle = self._service.in_flight == 0 and not self.server_state.tasks
        if self._end is not None and (is_idle or time.monotonic() >= self._end):
            self._service.end_all()
            return True
        return await super().on_tick(counter)


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """Reserve the address of a server, which begins to listen when it runs.

    Args:
        host, port: Of the network; port 0: a free one.
        uds: The path of a Unix socket instead; a socket that an earlier server left there is removed.

    Raises:
        OSError: If the address cannot be had.
        ValueError: For a port that is none.
    """
    address: Any
    if not 0 <= port < 1 << 16:  # getaddrinfo takes the last 16 bits
        raise ValueError(f"torch_infini.serve.bind: port must be an integer from 0 to 65535, got {port}")
    if uds is not None:
        if os.path.exists(uds) and stat.S_ISSOCK(os.stat(uds).st_mode):
            os.unlink(uds)
        family, protocol, address = socket.AF_UNIX, 0, uds
    else:
        family, _, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # With its protocol: asyncio sets TCP_NODELAY on connections of sockets that say TCP, and tokens are small packets.
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if uds is None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def remove_socket(path: str) -> None:
    """Remove the file that a Unix socket leaves."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configured(app: FastAPI, settings: ServeSettings, log_level: str) -> uvicorn.Config:
    """Return uvicorn's settings for a server with these; raises the limit on open files where that helps."""
    return uvicorn.Config(
        app,
        http=protocol(most_connections(settings.max_connections), settings.receive_timeout),
        log_level=log_level,
        timeout_graceful_shutdown=GRACE,
        backlog=ACCEPTED,
        server_header=False,
    )


def run_server(
    llm: AsyncLLM,
    settings: ServeSettings,
    listener: socket.socket,
    log_level: str = "info",
    extend: Callable[[FastAPI], FastAPI] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then close the engine, and remove the file of a Unix socket.

    Args:
        llm: The engine.
        settings: Of the server.
        listener: Of bind().
        log_level: Of uvicorn: critical, error, warning, info (with a line for each request), debug or trace.
        extend: Called with the application, to add routes.
    """
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    service = Service(llm, settings)
    try:
        app = create_app(service)
        if extend is not None:
            app = extend(app)
        config = configured(app, settings, log_level)
        Server(service, config).run([listener])
    finally:
        if path is not None:
            remove_socket(path)
        service.close()
        llm.close()
