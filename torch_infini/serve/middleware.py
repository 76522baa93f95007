"""ASGI middleware: request ids, the API key, limits and types of bodies. Plain ASGI, so that streams pass through."""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

PUBLIC = frozenset({"/health"})  # for load balancers, which have no key
ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Adds x-request-id to responses: the request's, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Authentication:
    """Rejects requests without "Authorization: Bearer KEY" or "X-Api-Key: KEY".

    Args:
        app: Gets all other requests.
        api_key: The key.
        public: Paths that need no key, below the path at which the application is mounted.
    """

    def __init__(self, app: ASGIApp, api_key: str, public: Collection[str] = PUBLIC) -> None:
        self._app, self._expected, self._public = app, api_key.encode(), public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_public(scope) or self._is_authorized(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        message = "Authorization must be Bearer with the server's API key, or X-Api-Key that key, got another or none"
        error = ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        await error.response(scope["path"])(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in self._public

    def _is_authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer" and self._is_key(key)
        return is_bearer or self._is_key(headers.get("x-api-key", ""))

    def _is_key(self, key: str) -> bool:
        # In constant time: the time of a plain comparison reveals how many characters are right.
        return hmac.compare_digest(key.strip().encode("latin-1"), self._expected)


class BodyLimit:
    """Rejects bodies that are too large, by their Content-Length or while they arrive, and those that are too slow.

    Args:
        app: Gets all other requests.
        max_body: The most bytes of a body.
        seconds: The most time from the head of a request to the end of its body.
    """

    def __init__(self, app: ASGIApp, max_body: int, seconds: float) -> None:
        self._app, self._max_body, self._seconds = app, max_body, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = Headers(scope=scope).get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body:
            return await self._error(f"{length[:20]}").response(scope["path"])(scope, receive, send)
        came, whole = 0, False
        clock = asyncio.get_running_loop().time
        end = clock() + self._seconds

        async def receive_counted() -> Message:
            nonlocal came, whole
            if whole:  # the next message is the client's disconnect
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - clock()))
            except asyncio.TimeoutError:  # noqa: UP041 (another class in Python 3.10)
                rule = f"the body must arrive within {self._seconds:g} s, got {came} bytes of it"
                raise ApiError(408, rule, headers={"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            came += len(message.get("body", b""))
            if came > self._max_body:
                raise self._error("more")
            return message

        await self._app(scope, receive_counted, send)

    def _error(self, came: str) -> ApiError:
        return ApiError(413, f"the body must have at most {self._max_body} bytes, got {came}")


class PlainJson:
    """Takes the bodies of some routes for JSON whatever their Content-Type, as their clients expect, such as `curl -d`.

    Not those that a web page sends, which have an Origin: browsers ask before they send JSON for a page of another
    site, and send other types unasked.

    Args:
        app: Gets the requests.
        prefix: That of the routes' paths, below the path at which the application is mounted.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_of_prefix(scope) and "origin" not in Headers(scope=scope):
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self._app(scope, receive, send)

    def _is_of_prefix(self, scope: Scope) -> bool:
        return bool(scope["path"].removeprefix(scope.get("root_path", "")).startswith(self._prefix))
