"""RequestLog: middleware that logs a line of JSON for each request; never a text, a key, or a query string.

Generation and Service note in the record of the current request what the engine computes for it.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import RequestOutput
from ..engine.outputs import Finish

log = logging.getLogger("torch_infini.requests")
MAX_PATH = 200  # characters of a path that is no route's
_CURRENT: ContextVar[RequestRecord | None] = ContextVar("torch_infini.serve.request_record", default=None)


class RequestRecord:
    """What the log has of one HTTP request.

    Attributes:
        model: The name under which the answer's model is served.
        prompt_tokens, samples: What the engine was asked for; 0: nothing.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.arrived = datetime.now(timezone.utc)
        self.model: str | None = None
        self.prompt_tokens = self.samples = 0
        self._first: float | None = None  # seconds to the first token
        self._newest: dict[str, RequestOutput] = {}

    def add(self, prompt_tokens: int, samples: int) -> None:
        """Note that prompts with so many tokens in all are in the engine, for so many samples in all."""
        self.prompt_tokens += prompt_tokens
        self.samples += samples

    def observe(self, output: RequestOutput) -> None:
        """Note the next output of one of the prompts, which has its earlier ones in it."""
        if self._first is None and any(one.token_ids for one in output.outputs):
            self._first = time.perf_counter() - self.began
        self._newest[output.request_id] = output

    def line(self, scope: Scope, status: int | None) -> str:
        """Return the line of a request that has ended, in ASCII."""
        outputs = [one for output in self._newest.values() for one in output.outputs]
        reasons = [one.finish_reason or Finish.ABORT.value for one in outputs]
        reasons += [Finish.ABORT.value] * (self.samples - len(reasons))
        entry: dict[str, Any] = {
            "time": self.arrived.isoformat(timespec="milliseconds"),
            "id": scope.get("state", {}).get("request_id"),
            "method": scope["method"],
            "route": getattr(scope.get("route"), "path", scope["path"][:MAX_PATH]),
            "model": self.model,
            "status": status,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": sum(len(one.token_ids) for one in outputs),
            "time_to_first_token": None if self._first is None else round(self._first, 6),
            "duration": round(time.perf_counter() - self.began, 6),
            "finish_reasons": reasons,
        }
        return json.dumps(entry)


def current_record() -> RequestRecord | None:
    """Return the record of the request that is being answered; None where requests are not logged."""
    return _CURRENT.get()


class RequestLog:
    """Logs requests when their answers have ended.

    Args:
        app: Answers them; behind RequestId.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord()
        token = _CURRENT.set(record)
        status: int | None = None

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = status or 500  # the answer is written outside of this middleware
            raise
        finally:
            _CURRENT.reset(token)
            log.info(record.line(scope, status))


def log_to_stderr() -> None:
    """Let the lines go to the error output, unless the program has a handler for them."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
