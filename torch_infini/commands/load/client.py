"""Client: sends one streamed request to a server with OpenAI's interface, and measures it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ..errors import CommandError
from .prompts import Prompt
from .results import Failure, Result

SHOWN = 200  # the most characters of a server's message
LONGEST = 16 << 20  # bytes of an event


class Failed(Exception):
    """A request failed.

    Args:
        kind, message: As of Failure.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


@dataclass(frozen=True)
class Target:
    """Where requests go, and what all of them have.

    Attributes:
        url: Of the server's interface, as http://127.0.0.1:8000/v1.
        endpoint: chat or completions.
        model: The model's name.
        api_key: Sent as a bearer token; None: none.
        fields: Further fields of bodies.
    """

    url: str
    endpoint: str
    model: str = ""
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{self.url}/chat/completions" if self.endpoint == "chat" else f"{self.url}/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the body of a request."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt.body(self.endpoint), **usage, **self.fields}


def interface_of(server: str) -> str:
    """Return the URL of a server's interface, which ends in /v1; CommandError for what is no URL."""
    try:
        parts = urlsplit(server)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise CommandError(f"--server must be a URL as http://127.0.0.1:8000, got {server!r}")
    url = server.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def session_of(target: Target, timeout: float) -> aiohttp.ClientSession:
    """Return a session without a limit on connections; `timeout` in seconds is that of a whole request."""
    limits = aiohttp.ClientTimeout(total=timeout)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=limits, headers=target.headers, read_bufsize=1 << 20
    )


async def first_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the first model that a server lists; CommandError if it lists none."""
    url = f"{target.url}/models"
    try:
        async with session.get(url) as response:
            text = (await response.content.read(LONGEST)).decode("utf-8", "replace")
            if response.status != 200:
                raise CommandError(f"--model must be given: GET {url} has status {response.status}: {said(text)}")
            return str(json.loads(text)["data"][0]["id"])
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise CommandError(
            f"--server must be one that answers, got {target.url}: {failure_of(error).message}"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise CommandError(f"--model must be given: GET {url} lists no model: {said(text)}") from None


async def send(session: aiohttp.ClientSession, target: Target, prompt: Prompt, result: Result) -> None:
    """Send a request and store what it took; failures too are stored."""
    body = json.dumps(target.body(prompt)).encode()
    start = time.perf_counter()
    try:
        await receive(session, target, body, result, start)
    except Failed as error:
        result.failure = error.failure
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        result.failure = failure_of(error)
    result.e2e = time.perf_counter() - start


async def receive(session: aiohttp.ClientSession, target: Target, body: bytes, result: Result, start: float) -> None:
    head = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    async with session.post(target.path, data=body, headers=head) as response:
        if response.status != 200:
            text = (await response.content.read(LONGEST)).decode("utf-8", "replace")
            raise Failed(f"HTTP {response.status}", said(text))
        if response.content_type != "text/event-stream":
            came = response.content_type
            raise Failed("no stream", f"the answer must be text/event-stream, got {came}")
        stream = Stream(result, start)
        async for data in response.content.iter_any():
            stream.add(data, time.perf_counter())
            if stream.is_done:
                break
        stream.finish()


class Stream:
    """A streamed answer, of which it measures the chunks.

    Args:
        result: Where figures go.
        start: When the request was sent, in seconds of time.perf_counter.

    Attributes:
        is_done: Whether the event [DONE] has come.
    """

    def __init__(self, result: Result, start: float) -> None:
        self._result, self._start = result, start
        self._events = Events()
        self._last = start  # when the last chunk with text came
        self._chunks = 0
        self._usage: dict[str, Any] | None = None
        self.is_done = False

    def add(self, data: bytes, now: float) -> None:
        """Take what came from the network at a time; Failed for an error of the server, or no valid event."""
        for event in self._events.add(data):
            if event == b"[DONE]":
                self.is_done = True
                return
            try:
                chunk = json.loads(event)
            except ValueError:
                chunk = None
            if not isinstance(chunk, dict):
                raise Failed(
                    "invalid event", f"an event must be a JSON object, got {shown(event.decode('utf-8', 'replace'))}"
                )
            self._take(chunk, now)

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            raise Failed("error event", said(json.dumps(chunk)))
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        choices = chunk.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise Failed("invalid event", f"choices must be objects, got {shown(json.dumps(choices))}")
        has_text = False
        for choice in choices:
            has_text = has_text or text_in(choice)
            self._result.finish_reason = choice.get("finish_reason") or self._result.finish_reason
        if has_text:
            if self._result.ttft is None:
                self._result.ttft = now - self._start
            else:
                self._result.gaps.append(now - self._last)
            self._last = now
            self._chunks += 1

    def finish(self) -> None:
        """Count the tokens; Failed if the answer is incomplete or empty."""
        usage = self._usage or {}
        output, given = usage.get("completion_tokens"), usage.get("prompt_tokens")
        self._result.output_tokens = output if isinstance(output, int) else self._chunks
        self._result.input_tokens = given if isinstance(given, int) else None
        if not self.is_done and self._result.finish_reason is None:
            raise Failed("incomplete stream", "the connection was closed before the answer ended")
        if not self._result.output_tokens:
            raise Failed("empty answer", "the answer has neither text nor tokens")


class Events:
    """The events of a stream: what is behind "data:", of several lines joined by newlines. Comments are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def add(self, data: bytes) -> Iterator[bytes]:
        """Take bytes, however they are cut; yield the events that they complete."""
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > LONGEST:
                raise Failed("invalid event", f"a line must be at most {LONGEST} bytes, got more")
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event


def text_in(choice: dict[str, Any]) -> bool:
    """Return whether a chunk's choice has text, reasoning or calls."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))


def failure_of(error: BaseException) -> Failure:
    """Return why a request failed for which there is no answer."""
    if isinstance(error, asyncio.TimeoutError):
        return Failure("timeout", "the answer did not end within --timeout")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure("no connection", shown(f"the server could not be reached: {error.os_error.strerror or error}"))
    return Failure("connection lost", shown(f"the connection ended: {error or type(error).__name__}"))


def said(text: str) -> str:
    """Return the message of an error object, or the text itself if it is none."""
    try:
        error = json.loads(text).get("error")
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, AttributeError):
        message = None
    return shown(message if isinstance(message, str) and message else text or "no message")


def shown(text: str) -> str:
    """Return a text as one line of at most SHOWN characters."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
