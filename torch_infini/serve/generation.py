"""Generation: the engine's requests of one HTTP request. Closing it cancels them, whatever the client waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from ..engine import AsyncLLM, RequestOutput, SamplingParams
from .errors import ENGINE_FAILED, ApiError, log

IDLE = 15.0  # seconds without an output, after which `newest` says that it still waits


class Generation:
    """The outputs of several prompts with the same settings.

    Only the newest output of each prompt is kept: it contains those before it, and a client that reads slowly must not
    let them pile up.

    Args:
        llm: The engine.
        prompts: Token ids, one list for each request of the engine.
        params: Of all of them.
        on_end: Called once, when no request is left in the engine.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        on_end: Callable[[Generation], None],
    ) -> None:
        self._llm, self._params, self._on_end = llm, params, on_end
        self._changed = asyncio.Event()
        self._newest: dict[int, RequestOutput] = {}
        self._error: ApiError | None = None
        self._running = {asyncio.create_task(self._follow(at, prompt)) for at, prompt in enumerate(prompts)}
        for task in self._running:
            task.add_done_callback(self._ended)

    async def newest(self) -> AsyncGenerator[tuple[int, RequestOutput] | None, None]:
        """Yield (index of the prompt, newest output) as the engine computes; None after IDLE seconds without one.

        Raises:
            ApiError: If the engine failed, or the server ends.
        """
        loop = asyncio.get_running_loop()
        while True:
            timer = loop.call_later(IDLE, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
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

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end; return the last output of each prompt. ApiError as newest."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.newest()) as outputs:
            async for new in outputs:
                last.update([new] if new is not None else [])
        return [last[at] for at in sorted(last)]

    def fail(self, error: ApiError) -> None:
        """Cancel what runs; the reader gets this error."""
        self._error = self._error or error
        for task in self._running:
            task.cancel()
        self._changed.set()

    def close(self) -> None:
        """Cancel what runs."""
        for task in self._running:
            task.cancel()

    async def _follow(self, at: int, prompt: list[int]) -> None:
        async with aclosing(self._llm.stream(prompt, self._params)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                for completion in output.completions:
                    if completion.error is not None:
                        raise RuntimeError(completion.error)
                self._newest[at] = output
                self._changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a request failed: %s", task.exception())
            dead = not self._llm.is_running
            self.fail(ApiError(500, ENGINE_FAILED, code="engine_dead" if dead else "engine_error"))
        self._changed.set()
        if not self._running:
            self._on_end(self)
