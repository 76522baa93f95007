"""ApiError: bad input, or a server that cannot serve, as OpenAI's error object. Bodies have no traceback and no path.

Unexpected exceptions are logged, and their answer is a fixed sentence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from .encoding import json_response

log = logging.getLogger("torch_infini")

# Status: (type, default code) of the error object.
KINDS = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "body_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "queue_full"),
    431: ("invalid_request_error", "head_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
}
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ENGINE_FAILED = "the engine could not compute the request; the server's log has the cause"
SHOWN = 80  # the most characters of a value in a message
LONGEST = 1000  # characters of a message


class ApiError(HTTPException):
    """An error with the response's status and error object.

    Args:
        status: A key of KINDS.
        message: One sentence.
        param: The field of the body; nested fields as messages[0].role.
        code: None: the status's default.
        headers: Headers of the response.
        details: What Anthropic's clients decide by, beside the message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code, self.details = param, code, details

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error object for a request of this path, in the form of the path's interface."""
        form = next((form for prefix, form in ERROR_FORMS.items() if path.startswith(prefix)), openai_error)
        return form(self)

    def response(self, path: str = "") -> Response:
        """Return the response to a request of this path."""
        return json_response(self.body(path), self.status_code, dict(self.headers or {}))


def openai_error(error: ApiError) -> dict[str, Any]:
    kind, code = KINDS.get(error.status_code, ("invalid_request_error", None))
    param = None if error.param is None else printable(error.param)
    return {"error": {"message": printable(error.detail), "type": kind, "param": param, "code": error.code or code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    status = error.status_code
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": printable(error.detail), **details}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": printable(error.detail)}


# By the beginning of the path; all other paths have OpenAI's.
ERROR_FORMS: dict[str, Callable[[ApiError], dict[str, Any]]] = {
    ANTHROPIC_PATH: anthropic_error,
    OLLAMA_PATH: ollama_error,
}


def bad_request(error: ValueError, **names: str) -> ApiError:
    """Convert a ValueError of SamplingParams or Engine, "torch_infini.NAME: ARGUMENT must ...", to an ApiError.

    Args:
        error: The client gets its message without the name of the class.
        **names: The body's name of an argument, if that differs.
    """
    message = re.sub(r"^torch_infini[\w.]*: ", "", str(error))
    message = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."  # the engine shows whole values
    found = re.match(r"(\w+) must ", message)
    argument = found[1] if found else None
    if argument in names:
        message = names[argument] + message.removeprefix(argument)
        argument = names[argument]
    return ApiError(400, message, argument)


def printable(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def shown(value: object) -> str:
    """Format a received value in at most SHOWN characters."""
    text = repr(value if not isinstance(value, (str, bytes)) else value[: SHOWN + 1])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def invalid(error: dict[str, Any]) -> ApiError:
    """Convert one of pydantic's errors to an ApiError."""
    place = [part for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body must be JSON, got an error: {error['ctx']['error']}", code="invalid_json")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if error["type"] == "missing":
        rule, came = "must be given", "none"
    else:
        rule = re.sub(r"^(Value error, |[A-Z]\w* should )", lambda m: "must " * ("should" in m[0]), error["msg"])
        came = shown(error["input"])
    if not param:
        return ApiError(400, f"the body must be a JSON object, got {came}")
    if error["type"] == "value_error":  # raised by schemas.py, complete with "got"
        return ApiError(400, f"{param} {rule}", param)
    return ApiError(400, f"{param} {rule}, got {came}", param)


def add_handlers(app: FastAPI) -> None:
    """Make the app answer every error with an error object."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if not isinstance(error, ApiError):
            detail = {404: f"there is no {request.method} {shown(request.url.path)}"}.get(error.status_code)
            error = ApiError(error.status_code, detail or str(error.detail), headers=dict(error.headers or {}))
        return error.response(request.url.path)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "")
        if not re.match(r"application/([\w.-]+\+)?json\s*(;|$)", kind):
            came = shown(kind) if kind else "none"
            return ApiError(415, f"Content-Type must be application/json, got {came}").response(request.url.path)
        return invalid(error.errors()[0]).response(request.url.path)

    async def on_fault(request: Request, error: Exception) -> Response:
        # Starlette raises the error again after this response, and uvicorn logs it.
        return ApiError(500, "the server failed; its log has the cause").response(request.url.path)

    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_fault)
