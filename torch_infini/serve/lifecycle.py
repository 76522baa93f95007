"""run_server: listens, drains at the first SIGTERM or Ctrl-C, and cancels running requests at the second."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..engine import AsyncLLM
from .app import create_app
from .connections import MAX_HEAD, connection_limit, protocol
from .request_log import log_to_stderr
from .service import Service
from .settings import ServeSettings

log = logging.getLogger("torch_infini")
ACCEPT_BATCH = 16  # connections accepted in one turn of the event loop
BACKLOG = 2048  # connections that wait in the kernel to be accepted
PORT_TRIES = 16  # for a port that is free at every host
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


def bind(host: str, port: int, uds: str | None = None, dual_stack: bool = True) -> socket.socket:
    """Bind a socket to the address of a server, which begins to listen when it runs.

    Args:
        host, port: The address; port 0: a free one.
        uds: The path of a Unix socket instead; a socket that an earlier server left there is removed.
        dual_stack: Whether host "::" is all addresses of IPv4 too, where the system has it so.

    Raises:
        OSError: If the address is not available; the message names it.
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
        try:
            family, _, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:  # the second of a name that is none
            cause = error.strerror if isinstance(error, OSError) else error
            raise OSError(
                f"torch_infini.serve.bind: host must be an address of this machine, got {host!r}: {cause}"
            ) from None
    # asyncio sets TCP_NODELAY only if the socket's protocol is given as TCP, and tokens are small packets.
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if uds is None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not dual_stack:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = f"{host} port {port}" if uds is None else uds
        rule = f"torch_infini.serve.bind: the address must be free and of this machine, got {where}: {error.strerror}"
        raise OSError(error.errno, rule) from None
    return listener


def bind_all(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Bind a socket to each of several hosts, at one port.

    Args:
        hosts: Addresses or names, all different; of several, "::" is IPv6 alone.
        port: The port; 0: one that is free at all of them.

    Raises:
        OSError: If one of the addresses is not available; the message names it.
        ValueError: For no host, one that is there twice, or an invalid port.
    """
    if not hosts or "" in hosts or len(set(hosts)) < len(hosts):
        raise ValueError(f"torch_infini.serve.bind_all: hosts must be names, all different, got {list(hosts)}")
    for left in reversed(range(PORT_TRIES if port == 0 and len(hosts) > 1 else 1)):
        bound: list[socket.socket] = []
        try:
            for host in hosts:
                at = bound[0].getsockname()[1] if bound else port
                bound.append(bind(host, at, dual_stack=len(hosts) == 1))
            return bound
        except BaseException as error:
            for listener in bound:
                listener.close()
            if not (bound and left and isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
                raise
    raise AssertionError


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
        h11_max_incomplete_event_size=MAX_HEAD,
        server_header=False,
    )


def run_server(
    llm: AsyncLLM,
    settings: ServeSettings,
    listeners: socket.socket | Sequence[socket.socket],
    log_level: str = "info",
    extend: Callable[[FastAPI], FastAPI] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then close the engine, and remove the file of a Unix socket.

    Args:
        llm: The engine.
        settings: The server's settings.
        listeners: A socket of bind(), or those of bind_all().
        log_level: uvicorn's: critical, error, warning, info (with a line for each request), debug or trace.
        extend: Called with the application, to add routes.
    """
    listeners = [listeners] if isinstance(listeners, socket.socket) else list(listeners)
    paths = [listener.getsockname() for listener in listeners if listener.family == socket.AF_UNIX]
    if settings.log_requests:
        log_to_stderr()
    service = Service(llm, settings)
    try:
        app = create_app(service)
        if extend is not None:
            app = extend(app)
        config = uvicorn_config(app, settings, log_level)
        Server(service, config).run(listeners)
    finally:
        for path in paths:
            remove_socket(path)
        service.close()
        llm.close()
