"""Generation: the engine's requests that belong to one HTTP request. Closing it cancels them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial

from ..engine import AsyncLLM, RequestOutput
from ..engine.sequence import Request
from .errors import ENGINE_FAILED, ApiError, bad_request, log
from .metrics import NOTHING_SEEN, ServerMetrics
from .request_log import current_record

IDLE = 15.0  # seconds without an output after which `newest` yields None


class Generation:
    """The outputs of several requests of the engine; for one event loop.

    Only the newest output of each request is kept: it contains the earlier ones, and they would pile up for a client
    that reads slowly.

    Args:
        llm: The engine.
        requests: Requests of Engine.new_request.
        metrics: Observes every output.
        on_end: Called once, when no request is left in the engine.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        requests: Sequence[Request],
        metrics: ServerMetrics,
        on_end: Callable[[Generation], None],
    ) -> None:
        self._llm, self._metrics, self._on_end = llm, metrics, on_end
        self._record = current_record()
        if self._record is not None:
            samples = sum(request.params.n for request in requests)
            self._record.add(sum(len(request.prompt) for request in requests), samples)
        self._seen = [NOTHING_SEEN] * len(requests)
        self._loop = asyncio.get_running_loop()
        self._calls = llm.calls()
        self._changed = asyncio.Event()
        self._last = self._loop.time()  # of an output
        self._newest: dict[int, RequestOutput] = {}
        self._error: ApiError | None = None
        self._running: dict[int, Future[str]] = {}  # by index of the request
        for at, request in enumerate(requests):
            # The engine's thread calls both callbacks.
            self._running[at] = llm.add(request, None, partial(self._calls.add, self._take, at))
            self._running[at].add_done_callback(partial(self._calls.add, self._added, at))

    async def newest(self) -> AsyncGenerator[tuple[int, RequestOutput] | None, None]:
        """Yield (index of the request, newest output) as the engine computes; None after IDLE seconds without one.

        Raises:
            ApiError: If the engine failed, or the server shuts down.
        """
        self._timer = self._loop.call_later(IDLE, self._tick)
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                new, self._newest = self._newest, {}
                for at, output in new.items():
                    yield at, output
                if self._error is not None:
                    raise self._error
                if not self._running and not self._newest:
                    return
                if not new:
                    yield None
        finally:
            self._timer.cancel()

    def _tick(self) -> None:
        """Wake the reader if there was no output for IDLE seconds. One timer for all outputs: it is set again when it
        has run."""
        left = self._last + IDLE - self._loop.time()
        if left <= 0:
            self._changed.set()
        self._timer = self._loop.call_later(left if left > 0 else IDLE, self._tick)

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end; return the last output of each request. Raises as newest."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.newest()) as outputs:
            async for new in outputs:
                last.update([new] if new is not None else [])
        return [last[at] for at in sorted(last)]

    def fail(self, error: ApiError) -> None:
        """Cancel the running requests; the reader gets this error."""
        self._error = self._error or error
        self._changed.set()
        self.close()

    def close(self) -> None:
        """Cancel the running requests."""
        running, self._running = self._running, {}
        for request in running.values():
            self._llm.cancel(request)
        if running:
            self._on_end(self)

    def _added(self, at: int, request: Future[str]) -> None:
        if request.cancelled() or (error := request.exception()) is None:
            return
        if isinstance(error, ValueError):  # of a prompt's images, which the model has seen only now
            self.fail(bad_request(error))
        else:
            self._take(at, error)

    def _take(self, at: int, output: RequestOutput | BaseException | None) -> None:
        """Receive an output, or the error that ended the engine."""
        if at not in self._running:
            return
        if self._record is not None and isinstance(output, RequestOutput):
            self._record.observe(output)
        if not isinstance(output, RequestOutput):
            return self._failed(str(output))
        for completion in output.outputs:
            if completion.error:
                return self._failed(completion.error)
        self._seen[at] = self._metrics.observe(output, self._seen[at])
        self._newest[at] = output
        self._last = self._loop.time()
        self._changed.set()
        if output.finished:
            del self._running[at]
            if not self._running:
                self._on_end(self)

    def _failed(self, error: str) -> None:
        log.error("a request failed: %s", error)
        code = "engine_error" if self._llm.is_running else "engine_dead"
        self.fail(ApiError(500, ENGINE_FAILED, code=code))
