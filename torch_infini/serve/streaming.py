"""respond: sends answers, whole or as a stream of events; if the client disconnects, generation is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine import CompletionOutput, RequestOutput, SamplingParams, TokenLogprobs
from ..engine.outputs import Finish
from .answers import Answer, DeltaTracker
from .encoding import json_response
from .errors import ApiError
from .generation import Generation

CLIENT_CLOSED_REQUEST = 499  # for the log; no client reads the response
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer events


async def respond(
    request: Request, generation: Generation, answer: Answer, samples: int, stream: bool, include_usage: bool
) -> Response:
    """Return the response that sends an answer, or the stream of its chunks."""
    if stream:
        return EventStream(generation, events(generation, answer, samples, include_usage), answer.MEDIA_TYPE)
    try:
        outputs = await run_until_disconnect(request.receive, generation.finish())
    finally:
        generation.close()
    return Response(status_code=CLIENT_CLOSED_REQUEST) if outputs is None else json_response(answer.whole(outputs))


def without_tokens(outputs: Sequence[RequestOutput], params: SamplingParams) -> list[RequestOutput]:
    """Return outputs of prompts with params.n samples each that have no tokens."""
    logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
    empty = CompletionOutput(0, "", [], Finish.LENGTH.value, token_logprobs=logprobs)
    samples = [replace(empty, index=i) for i in range(params.n)]
    return [replace(output, outputs=samples) for output in outputs]


def respond_finished(
    outputs: Sequence[RequestOutput], samples: int, answer: Answer, stream: bool, include_usage: bool
) -> Response:
    """Return the response of an answer whose outputs, with so many samples each, are finished."""
    if not stream:
        return json_response(answer.whole(outputs))
    parts = DeltaTracker(samples, answer)
    new = [part for at, output in enumerate(outputs) for part in parts.new(at, output)]
    data = b"".join(answer.events(part, include_usage) for part in new) + answer.end(outputs, include_usage)
    return Response(data, 200, HEADERS, answer.MEDIA_TYPE)


async def events(
    generation: Generation, answer: Answer, samples: int, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer. An error is an event too, because the status has been sent."""
    parts = DeltaTracker(samples, answer)
    try:
        async with aclosing(generation.newest()) as outputs:
            async for new in outputs:
                changed = () if new is None else parts.new(*new)
                data = b"".join(answer.events(part, include_usage) for part in changed)
                data = answer.PING if new is None else data
                if data:
                    yield data
        yield answer.end(parts.outputs.values(), include_usage)
    except ApiError as error:
        yield answer.failure(error)


class EventStream(Response):
    """A response of events; it ends, and closes the generation, when the client disconnects.

    Starlette's StreamingResponse does not watch for disconnects if the server's ASGI version is 2.4 or later.

    Args:
        generation: Computes the events.
        events: The events as bytes.
        media_type: The response's.
    """

    def __init__(self, generation: Generation, events: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(None, 200, HEADERS, media_type)
        del self.headers["content-length"]
        self._generation, self._events = generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send(send))
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of `work`; cancel it and return None if the client disconnects first."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; call after the request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
