"""Connections of a server: their number, the time that a request may take to arrive, and the answer to bad HTTP.

When the limit is reached, a new connection replaces the one that has been without a request for longest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .errors import ApiError

log = logging.getLogger("torch_infini")
MAX_HEAD = 64 << 10  # bytes
HEADROOM = 64  # descriptors for files, pipes and sockets other than clients'
LOG_INTERVAL = 60.0  # seconds between two equal warnings
BAD_HTTP = "the request must be valid HTTP/1.1, got something else"
FULL = "the largest number of connections is open, and all have a request"


def connection_limit(wanted: int) -> int:
    """Return how many connections may be open, at most `wanted`; raise the limit on open files if that helps.

    Raises:
        ValueError: If no descriptor is left for a connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else HEADROOM
    needed = own + HEADROOM + wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - own - HEADROOM)
    if most < 1:
        raise ValueError(
            f"torch_infini.serve: the limit on open files (ulimit -n) must be at least {own + HEADROOM + 1}, got {soft}"
        )
    if most < wanted:
        log.warning("at most %d connections, not %d: the limit on open files (ulimit -n) is %d", most, wanted, soft)
    return most


def protocol(most: int, seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with these limits.

    Args:
        most: The most open connections.
        seconds: Time for the head of a request to arrive, from the connection's beginning.
    """
    return type("Connection", (_Connection,), {"most": most, "seconds": seconds, "waiting": {}})


class _Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection with a time limit for the head of a request and a limit on the number of connections."""

    most: int
    seconds: float
    waiting: dict[_Connection, None]  # connections without a request, those that have waited longest first
    connections: set[Any]
    transport: asyncio.Transport
    _warned = -LOG_INTERVAL  # time of the last warning that connections were closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self.waiting[self] = None
        self._wait_for_head()
        if len(self.connections) > self.most:
            self._make_room()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered; part of a request's head may have arrived."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait_for_head(self) -> None:
        self._came = False
        self._timer = self.loop.call_later(self.seconds, self._expire)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if not self.is_idle or self.transport.is_closing():
            return
        if self._came:
            self.refuse(ApiError(408, f"the head of a request must arrive within {self.seconds:g} s, got a part"))
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request; if there is none, reject this one."""
        if self.loop.time() >= _Connection._warned + LOG_INTERVAL:
            _Connection._warned = self.loop.time()
            log.warning(
                "%d connections are open, %d without a request: the oldest of these is closed to accept a new one",
                len(self.connections),
                sum(other.is_idle for other in self.connections if other is not self),
            )
        while (oldest := next(iter(self.waiting))) is not self:
            del self.waiting[oldest]
            if oldest.is_idle and not oldest.transport.is_closing():
                oldest.transport.abort()
                return
        self.refuse(ApiError(503, FULL, headers={"Retry-After": "1"}))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        waited = self.is_idle
        if waited and self._timer is None:
            self._wait_for_head()
        self._came = True
        super().data_received(data)
        if not self.is_idle:
            self.waiting.pop(self, None)
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle:  # not if the next request arrived together with this one
            self.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # What h11 has not read yet: of a head that is too large all of it. httptools has no limit.
        unread = getattr(getattr(self, "conn", None), "trailing_data", (b"",))[0]
        if self.is_idle and len(unread) > MAX_HEAD:
            self.refuse(ApiError(431, f"the head of a request must have at most {MAX_HEAD} bytes, got more"))
        else:
            self.refuse(ApiError(400, BAD_HTTP, code="bad_http"))

    def refuse(self, error: ApiError) -> None:
        """Answer with an error object, unless an answer has begun, and close the connection."""
        self._stop_waiting()
        if not self.is_idle:
            begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if begun:
                self.transport.close()
                return
        response = error.response()
        reason = HTTPStatus(error.status_code).phrase.encode()
        lines = [b"HTTP/1.1 %d %s" % (error.status_code, reason)]
        lines += [b"%s: %s" % header for header in (*response.raw_headers, (b"connection", b"close"))]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()
