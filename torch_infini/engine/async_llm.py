"""AsyncLLM: an Engine for asyncio. One thread steps it; requests come from any event loop and may be cancelled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from .._core import library
from ..distributed import Followers
from .chat import Message
from .engine import Engine
from .llm import LLM, pairs_of
from .loop_calls import LoopCalls
from .lora import LoRARequest
from .outputs import (
    EmbeddingRequestOutput,
    Metrics,
    RequestOutput,
    RequestOutputKind,
    ScoringRequestOutput,
    embedding_of,
    of_kind,
    score_of,
)
from .pooling import Pooling
from .prompts import Prompt
from .runner import do_nothing
from .sampling_params import SamplingParams
from .sequence import Request

log = logging.getLogger("torch_infini")
_CALLS = 0.05  # seconds between two steps: images take long to encode, and other requests go on meanwhile
Deliver = Callable[[RequestOutput | BaseException], None]


class AsyncLLM:
    """An LLM for asyncio: requests join the running batch at any time.

    Args:
        *args, **settings: As torch_infini.LLM; or an LLM, which nothing else may use until this object is closed.

    Raises:
        ValueError: Under torchrun on another rank than 0; as LLM. The other ranks call LLM(...).follow() instead.

    Example:
        >>> async with AsyncLLM("path/to/model") as llm:
        >>>     async for output in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
        >>>         print(output.outputs[0].new_text, end="")
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._llm = args[0] if args and isinstance(args[0], LLM) and not settings else LLM(*args, **settings)
        tp_group = self._llm.engine.model.tp_group
        self._followers: Followers | None = None
        if tp_group is not None and tp_group.workers is None:
            if tp_group.rank != 0:
                raise ValueError(
                    "torch_infini.AsyncLLM: the rank must be 0, to which requests come (other ranks of torchrun call "
                    f"torch_infini.LLM(...).follow()), got {tp_group.rank}"
                )
            self._followers = self._llm.engine.lead()
        self._thread = _EngineThread(self._llm.engine)
        self._calls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls] = weakref.WeakKeyDictionary()
        # The thread holds no reference to this object, so that dropping it ends the thread.
        self._finalizer = weakref.finalize(self, _close, self._thread, self._followers)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Continue a prompt; cancelling the task cancels the request.

        Args:
            prompt: Text or token ids, also as {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None: the model's defaults (generation_config).
            lora_request: The prompt's adapter, or None.

        Returns:
            The finished output.

        Raises:
            ValueError: For a prompt that cannot be served.
            RuntimeError: If this is closed, or its thread failed.
        """
        outputs = [output async for output in self._outputs(prompt, sampling_params, lora_request)]
        return outputs[-1]

    async def chat(self, messages: list[Message], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation: [{"role": "user", "content": "..."}, ...]. Otherwise as generate."""
        return await self.generate(self._llm.chat_prompt(messages), sampling_params)

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        lora_request: LoRARequest | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute the embedding of one prompt, in steps that other requests share; cancelling the task cancels it.

        Args:
            prompt: As generate.
            pooling, normalize, dimensions, truncate_prompt_tokens, prompt_name: As LLM.embed.
            lora_request: The prompt's adapter, or None.

        Raises:
            ValueError: For a prompt or settings that cannot be served, or a model that ranks share.
            RuntimeError: If this is closed, its thread failed, or a step failed.
        """
        engine = self._llm.engine
        params = engine.prompts.pooling.merge(pooling, normalize, dimensions, truncate_prompt_tokens, prompt_name)
        request = engine.new_request(prompt, None, lora_request, params)
        outputs = [output async for output in self._outputs(request, None, None)]
        return embedding_of(outputs[-1])

    async def score(
        self,
        query: str,
        document: str,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> ScoringRequestOutput:
        """Score a document for a query with a cross-encoder; arguments and errors as LLM.score, otherwise as embed."""
        engine = self._llm.engine
        params = engine.score_params(use_activation, truncate_prompt_tokens, only=1)
        [pair] = pairs_of(query, [document])
        ids, types = engine.prompts.encode_pair(*pair, params)
        request = engine.new_request(ids, None, None, params, types)
        return score_of([output async for output in self._outputs(request, None, None)][-1])

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt, with an output for every step; leaving the loop cancels the request.

        Args:
            prompt: Text or token ids, also as {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None: the model's defaults (generation_config).
            lora_request: The prompt's adapter, or None.

        Yields:
            The output so far, or the part that sampling_params.output_kind selects.

        Raises:
            ValueError: For a prompt that cannot be served.
            RuntimeError: If this is closed, or its thread failed.
        """
        kind = RequestOutputKind.CUMULATIVE if sampling_params is None else sampling_params.output_kind
        async with aclosing(self._outputs(prompt, sampling_params, lora_request)) as outputs:
            async for output in outputs:
                if (shaped := of_kind(output, kind)) is not None:
                    yield shaped

    async def _outputs(
        self, prompt: Prompt | Request, params: SamplingParams | None, lora_request: LoRARequest | None
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        request = self.add(prompt, params, partial(self.calls().add, outputs.put_nowait), lora_request)
        try:
            await asyncio.wrap_future(request)
            while True:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self.cancel(request)

    def add(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None,
        deliver: Deliver,
        lora_request: LoRARequest | None = None,
    ) -> Future[str]:
        """Add a request from any thread; its outputs go to `deliver`.

        Args:
            prompt: As in stream, or a Request of Engine.new_request.
            params: None: the model's defaults. A Request has its own.
            deliver: Called on the engine's thread with each output, or with the error that ended the thread. It must
                neither block nor raise.
            lora_request: The prompt's adapter, or None. A Request has its own.

        Returns:
            A future of the request's id; its exception is the ValueError of a prompt that cannot be served.

        Raises:
            RuntimeError: If this is closed, or its thread failed.
        """
        return self._thread.add(prompt, params, deliver, lora_request)

    def calls(self) -> LoopCalls:
        """Return what runs calls of the engine's thread in the running event loop; `deliver` may use it."""
        return self._calls.setdefault(loop := asyncio.get_running_loop(), LoopCalls(loop))

    def cancel(self, request: Future[str]) -> None:
        """Cancel a request of add from any thread, unless it is finished; `deliver` is not called again."""
        self._thread.abort(request)

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread runs, and under torchrun all ranks: none was closed or has failed."""
        return self._thread.is_running and (self._followers is None or self._followers.all_alive)

    def metrics(self) -> Metrics:
        """The engine's Metrics."""
        return self._llm.metrics()

    @property
    def engine(self) -> Engine:
        """The Engine, for its settings, limits and tokenizer; only this object's thread may add requests or step it."""
        return self._llm.engine

    def chat_prompt(self, messages: list[Message], template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the tokens of a conversation up to the assistant's answer; as LLM.chat_prompt."""
        return self._llm.chat_prompt(messages, template)

    def close(self) -> None:
        """Cancel all requests and end the thread; also called when the object is dropped or its `async with` ends."""
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()


def _close(thread: _EngineThread, followers: Followers | None) -> None:
    thread.stop()
    if followers is not None:
        followers.close()


class _EngineThread:
    """The engine's thread, and the calls that it runs between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._deliver: dict[str, Deliver] = {}
        self._outputs: list[RequestOutput] = []  # of the last step, not delivered yet
        engine.call_before_compute(self._deliver_outputs)
        self._error: RuntimeError | None = None
        library.release_threads()  # this thread has loaded the model, and computes no more
        self._thread = threading.Thread(target=self._run, name="torch_infini.AsyncLLM", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._error is None

    def add(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None,
        deliver: Deliver,
        lora_request: LoRARequest | None = None,
    ) -> Future[str]:
        """Add a request between steps; return the future of its id.

        Args:
            deliver: Called with each output of the request, or with the error that ended the thread.
        """
        future: Future[str] = Future()

        def add() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._error is not None:
                    raise self._error
                id = self._engine.add(prompt, params, None, lora_request)
            except Exception as error:
                future.set_exception(error)
                return
            self._deliver[id] = deliver
            future.set_result(id)

        self._enqueue(add)
        return future

    def abort(self, request: Future[str]) -> None:
        """Cancel a request between steps, if it is not finished."""

        def abort() -> None:
            if not request.cancel() and request.exception() is None:
                self._deliver.pop(request.result(), None)
                self._engine.abort(request.result())

        with suppress(RuntimeError):  # closed meanwhile: there is nothing left to cancel
            self._enqueue(abort)

    def _enqueue(self, call: Callable[[], None]) -> None:
        with self._wake:
            if self._error is not None:
                raise self._error
            self._calls.append(call)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after its current step."""
        with self._wake:
            self._error = self._error or RuntimeError("torch_infini.AsyncLLM: object must be open, got a closed one")
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._error is None:
                with self._wake:
                    while not self._calls and self._engine.is_idle and self._error is None:
                        self._wake.wait()
                began = time.perf_counter()
                if self._calls:  # which may take long
                    self._deliver_outputs()
                while self._calls and time.perf_counter() - began < _CALLS:
                    self._calls.popleft()()
                outputs = self._engine.step()
                self._deliver_outputs()  # of the step before, if nothing was computed
                self._outputs = outputs
                if self._engine.is_idle:
                    self._deliver_outputs()
        except BaseException as error:
            log.exception("the engine's thread failed")
            with self._wake:
                self._error = RuntimeError(f"torch_infini.AsyncLLM: the engine failed: {error}")
        self._engine.call_before_compute(do_nothing)
        self._deliver_outputs()
        for call in self._calls:
            call()
        for deliver in self._deliver.values():
            deliver(self._error)

    def _deliver_outputs(self) -> None:
        """Deliver a step's outputs: while the next step computes, so that what they wake does not hold it up.

        With one thread of two cores, 160M and 32 streaming clients, that is 1.04 times as fast (by hand).
        """
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            deliver = (
                self._deliver.pop(output.request_id, None) if output.finished else self._deliver.get(output.request_id)
            )
            if deliver is not None:
                deliver(output)
