"""run_server: listens, drains at the first SIGTERM or Ctrl-C, and cancels running requests at the second."""

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
from .connections import connection_limit, protocol
from .request_log import log_to_stderr
from .service import Service
from .settings import ServeSettings

log = logging.getLogger("torch_infini")
ACCEPT_BATCH = 16  # connections accepted in one turn of the event loop
BACKLOG = 2048  # connections that wait in the kernel to be accepted
GRACE = 1  # seconds to write responses after the last request ended


class Server(uvicorn.Server):
    """uvicorn's server, with a signal handler that lets running requests finish and rejects new ones.

    uvicorn's own handler stops listening first, so that new requests would find a closed port instead of a 503, and
    raises the signal again at the end, so that the exit status would not be 0.

    Args:
        service: The service to drain.
        config: uvicorn's.
    """

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service
        self._deadline: float | None = None  # when requests that still run are cancelled

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio also accepts up to its backlog in one turn, and a thousand connections take 0.15 s.
        for listener in sockets or ():
            listener.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is None:
            self.drain()
        elif self._deadline > time.monotonic():
            self._deadline = time.monotonic()
        else:
            self.force_exit = self.should_exit = True

    def drain(self) -> None:
        """Reject new requests; end when running ones are finished, at the latest after settings.drain seconds."""
        self._service.drain()
        self._deadline = time.monotonic() + self._service.settings.drain
        log.warning("draining: %d samples are running or waiting", self._service.in_flight)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; uvicorn calls this ten times a second."""
        # uvicorn's tasks are responses: some that are computed may still have to be sent.
        is_idle = self._service.in_flight == 0 and not self.server_state.tasks
        if self._deadline is not None and (is_idle or time.monotonic() >= self._deadline):
            self._service.end_all()
            return True
        return await super().on_tick(counter)


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """Bind a socket to the address of a server, which begins to listen when it runs.

    Args:
        host, port: The address; port 0: a free one.
        uds: The path of a Unix socket instead; a socket that an earlier server left there is removed.

    Raises:
        OSError: If the address is not available.
        ValueError: For an invalid port.
    """
    address: Any
    if not 0 <= port < 1 << 16:  # getaddrinfo would use the low 16 bits
        raise ValueError(f"torch_infini.serve.bind: port must be an integer from 0 to 65535, got {port}")
    if uds is not None:
        if os.path.exists(uds) and stat.S_ISSOCK(os.stat(uds).st_mode):
            os.unlink(uds)
        family, protocol, address = socket.AF_UNIX, 0, uds
    else:
        family, _, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio sets TCP_NODELAY only if the socket's protocol is given as TCP, and tokens are small packets.
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
    """Remove the file of a Unix socket."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(app: FastAPI, settings: ServeSettings, log_level: str) -> uvicorn.Config:
    """Make uvicorn's config of these settings; raise the limit on open files if that helps."""
    return uvicorn.Config(
        app,
        http=protocol(connection_limit(settings.max_connections), settings.receive_timeout),
        log_level=log_level,
        access_log=not settings.log_requests,
        timeout_graceful_shutdown=GRACE,
        backlog=ACCEPT_BATCH,
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
        settings: The server's settings.
        listener: A socket of bind().
        log_level: uvicorn's: critical, error, warning, info (with a line for each request), debug or trace.
        extend: Called with the application, to add routes.
    """
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    if settings.log_requests:
        log_to_stderr()
    service = Service(llm, settings)
    try:
        app = create_app(service)
        if extend is not None:
            app = extend(app)
        config = uvicorn_config(app, settings, log_level)
        Server(service, config).run([listener])
    finally:
        if path is not None:
            remove_socket(path)
        service.close()
        llm.close()
