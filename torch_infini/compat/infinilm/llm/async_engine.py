"""AsyncLLMEngine: torch_infini.AsyncLLM with InfiniLM's configuration and requests, for servers.

Requests are added, cancelled and read from any thread and any event loop; one thread of AsyncLLM runs the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ....engine import AsyncLLM, Metrics
from ....engine import RequestOutput as EngineOutput
from ....engine.chat import Message
from .config import EngineConfig
from .engine import LLMEngine, TakesRequests
from .request import FinishReason, InferenceRequest, SampleDelta, TokenOutput, reason_of

_NAME = "infinilm.llm.AsyncLLMEngine"


class AsyncLLMEngine(TakesRequests):
    """A model that serves requests while more arrive.

    Args:
        config: EngineConfig; or, as model_path, the folder, with the config's fields as further arguments.
        **fields: Fields of EngineConfig and further arguments of torch_infini.LLM, unless config is an EngineConfig.

    Attributes:
        config: EngineConfig.
        engine: The LLMEngine. Between start() and stop() only this object may use it.

    Raises:
        As LLMEngine.

    Example:
        >>> engine = AsyncLLMEngine("path/to/model")
        >>> engine.start()
        >>> request = engine.add_request("Once upon a time", sampling_params=SamplingParams(max_tokens=32))
        >>> async for token in engine.stream_request(request):
        >>>     print(token.token_text, end="")
        >>> engine.stop()
    """

    def __init__(self, config: EngineConfig | Any = None, **fields: Any) -> None:
        if not isinstance(config, EngineConfig):
            config = EngineConfig.of(**fields) if config is None else EngineConfig.of(config, **fields)
        elif fields:
            raise ValueError(f"{_NAME}: fields must not be given beside an EngineConfig, got {', '.join(fields)}")
        self.config = config
        self.engine = LLMEngine(config)
        self._lock = threading.RLock()  # guards everything below, and calls of the tokenizer
        self._llm: AsyncLLM | None = None
        self._requests: dict[str, InferenceRequest] = {}  # unfinished requests

    @property
    def is_running(self) -> bool:
        """Whether requests are served: after start(), until stop() or a failure of the engine."""
        return self._llm is not None and self._llm.is_running

    def start(self) -> None:
        """Start serving requests; does nothing if already started. Can be called again after a failure or stop().

        Raises:
            ValueError: As torch_infini.AsyncLLM, under torchrun.
        """
        with self._lock:
            if not self.is_running:
                self.stop()
                self._llm = AsyncLLM(self.engine.llm)

    def stop(self) -> None:
        """Cancel all requests and end the engine's thread after its current step; does nothing if it is not running."""
        with self._lock:
            if self._llm is None:
                return
            left = list(self._requests.values())
            for request in left:
                request.end(FinishReason.CANCELED)
            self._llm.close()
            self._llm = None
            self._requests.clear()
            for request in left:
                added = request.added
                if added is not None and added.done() and not added.cancelled() and added.exception() is None:
                    self.engine.llm.engine.abort(added.result())

    def _add(self, request: InferenceRequest) -> None:
        with self._lock:
            llm = self._running()
            if request.request_id in self._requests:
                raise ValueError(
                    f"{_NAME}: request_id must be that of no request that goes on, got {request.request_id!r}"
                )
            made = self.engine.new_request(request.engine_prompt, request.sampling_params)
            request.bind(made, partial(_cancel, llm, self._requests, request))
            self._requests[request.request_id] = request  # before the engine may finish it
            try:
                request.added = llm.add(made, None, partial(_deliver, self._requests, request))
            except BaseException:
                del self._requests[request.request_id]
                raise
        request.added.add_done_callback(partial(_check_added, request))

    def _chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        with self._lock:
            self._running()
            return self.engine.llm.chat_prompt(messages)

    async def stream_request(
        self, request: InferenceRequest, timeout: float | None = None, request_timeout: float | None = None
    ) -> AsyncIterator[TokenOutput]:
        """Yield a request's tokens as they come; leaving the loop cancels the request.

        Args:
            request: A request of add_request or add_chat_request that has no reader yet.
            timeout: The most seconds to wait for a token; then the request is cancelled, and its last TokenOutput has
                finish_reason TIMEOUT. None: no limit.
            request_timeout: The same for the whole request, from its arrival.

        Yields:
            A TokenOutput for each token; one more, without a token, if the request was cancelled or failed.

        Raises:
            ValueError: For an object that is not a request of an engine, or a request that has a reader.
            RuntimeError: If the engine failed.
        """
        if not isinstance(request, InferenceRequest) or not request.is_added:
            raise ValueError(f"{_NAME}.stream_request: request must be one of add_request, got {request!r}")
        box = request.outbox
        if box.has_reader:
            raise ValueError(f"{_NAME}.stream_request: request must have one reader, got a second one for {request!r}")
        box.has_reader = True
        loop = asyncio.get_running_loop()
        left = request.sample_count
        texts = [""] * left
        end = None if request_timeout is None else loop.time() + request_timeout - (time.time() - request.arrival_time)
        try:
            while left:
                until = end
                if timeout is not None:
                    until = loop.time() + timeout if end is None else min(end, loop.time() + timeout)
                part = await box.get(until)
                if part is None:
                    request.abort(FinishReason.TIMEOUT)
                    continue
                if isinstance(part, BaseException):
                    raise part
                index, tokens, text, reason = part
                if index < 0:  # before the samples had ended
                    yield TokenOutput(request.request_id, None, "", True, reason, texts[0])
                    return
                texts[index] += text
                for token in tokens[:-1]:  # of an interrupted step: the text comes with the last token
                    yield TokenOutput(request.request_id, token, "", False, None, texts[index], index)
                last = tokens[-1] if tokens else None
                yield TokenOutput(request.request_id, last, text, reason is not None, reason, texts[index], index)
                left -= reason is not None
        finally:
            request.abort()

    def metrics(self) -> Metrics:
        """The engine's Metrics."""
        return self.engine.metrics()

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError(f"{_NAME}: the engine must have been started, got one that was not, or was stopped")
        if not self._llm.is_running:
            raise RuntimeError(f"{_NAME}: the engine must be running, got one that failed (start it again)")
        return self._llm


# None of these functions holds the AsyncLLMEngine, so that dropping it ends its thread.
Requests = dict[str, InferenceRequest]


def _deliver(requests: Requests, request: InferenceRequest, output: EngineOutput | BaseException) -> None:
    """Handle a step's output, on the engine's thread."""
    if isinstance(output, BaseException):  # the thread failed or was closed; stop() cancels the rest
        request.fail(output)
        return
    if output.finished:  # before its reader knows: the id is free then
        requests.pop(request.request_id, None)
        request.release()
    for c in output.outputs:
        if not c.finished():
            if c.new_token_ids:
                request.outbox.put(SampleDelta(c.index, c.new_token_ids, c.new_text, None))
        elif c.index not in request.ended_samples:
            request.ended_samples.add(c.index)
            request.outbox.put(
                SampleDelta(c.index, c.new_token_ids, c.new_text, reason_of(c.finish_reason, c.stop_reason))
            )


def _check_added(request: InferenceRequest, added: Future[str]) -> None:
    """Tell a request that the engine's thread ended before it accepted it."""
    error = None if added.cancelled() else added.exception()
    if error is not None:
        request.fail(error)


def _cancel(llm: AsyncLLM, requests: Requests, request: InferenceRequest) -> None:
    """Cancel a request, on its caller's thread."""
    if request.added is not None:  # otherwise add_request has not returned, and no one else has the request
        llm.cancel(request.added)
    if requests.get(request.request_id) is request:
        requests.pop(request.request_id, None)
    request.release()
