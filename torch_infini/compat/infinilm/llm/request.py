"""InferenceRequest: a request, and a view of what the engine has generated for it; and the outputs for callers.

The state of a request is the engine's Request: nothing is stored twice, and a token costs nothing here until it is
read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from uuid import uuid4

from .... import engine
from ....engine.prompts import Prompt
from ....engine.sequence import Request, output_of


class FinishReason(str, Enum):
    """Why an output ended."""

    EOS_TOKEN = "eos_token"  # an end-of-sequence token, or one of stop_token_ids
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_tokens, the model's positions or the cache
    CANCELED = "canceled"
    TIMEOUT = "timeout"  # of AsyncLLMEngine.stream_request
    ERROR = "error"


class RequestStatus(str, Enum):
    """The state of a request."""

    WAITING = "waiting"  # for a place in the batch, at first or after a preemption
    RUNNING = "running"
    FINISHED = "finished"
    CANCELED = "canceled"
    TIMEOUT = "timeout"
    FAILED = "failed"


_ENDED = {
    FinishReason.CANCELED: RequestStatus.CANCELED,
    FinishReason.TIMEOUT: RequestStatus.TIMEOUT,
    FinishReason.ERROR: RequestStatus.FAILED,
}
_REASONS = {"length": FinishReason.LENGTH, "abort": FinishReason.CANCELED, "error": FinishReason.ERROR}


def reason_of(finish: str | None, stopped_by: int | str | None) -> FinishReason | None:
    """Return why a sample ended, from the engine's two names for it; None: it has not ended."""
    if finish is None:
        return None
    stop = FinishReason.STOP_STRING if isinstance(stopped_by, str) else FinishReason.EOS_TOKEN
    return _REASONS.get(finish, stop)


class CompletionOutput(engine.CompletionOutput):
    """One sample of a request; finish_reason is a FinishReason."""


@dataclass(frozen=True)
class RequestOutput(engine.RequestOutput):
    """The output of a request; torch_infini's RequestOutput, whose outputs are CompletionOutputs of this module.

    Attributes:
        ended: Why the request ended before its samples did: TIMEOUT; None: it did not.
    """

    ended: FinishReason | None = None

    @classmethod
    def of(
        cls, output: engine.RequestOutput, id: str | None = None, ended: FinishReason | None = None
    ) -> RequestOutput:
        """Make one of the engine's output; its id is that of the engine where none is given."""
        outputs = [
            CompletionOutput(**vars(one) | {"finish_reason": reason_of(one.finish_reason, one.stop_reason)})
            for one in output.outputs
        ]
        values = vars(output) | {"outputs": outputs}
        return cls(**values | ({} if id is None else {"request_id": id}), ended=ended)

    @property
    def finished(self) -> bool:
        return self.ended is not None or super().finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first sample; None: it goes on."""
        reason = self.outputs[0].finish_reason
        return self.ended or (None if reason is None else FinishReason(reason))


@dataclass(slots=True)
class TokenOutput:
    """A token of a request, as stream_request yields it.

    Attributes:
        request_id: The request's id.
        token_id: None if the output ended without a further token.
        token_text: The text that it added, "" for an end token; text that may belong to a later token's character or
            stop string is delivered with that token.
        finished: Whether it is the sample's last token.
        finish_reason: The reason; None if it is not the last.
        generated_text: The text so far.
        index: The sample's index.
    """

    request_id: str
    token_id: int | None
    token_text: str
    finished: bool
    finish_reason: FinishReason | None
    generated_text: str
    index: int = 0


class SampleDelta(NamedTuple):
    """A step's addition to a sample: tokens, text, and why it ended. Sample -1: the whole request ended."""

    sample: int
    tokens: Sequence[int]
    text: str
    reason: FinishReason | None


class Outbox:
    """Parts passed from the engine's thread to one reader in any event loop."""

    def __init__(self) -> None:
        self._parts: deque[SampleDelta | BaseException] = deque()
        self._waiter: asyncio.Future[None] | None = None  # replaced only by the reader
        self.has_reader = False

    def put(self, part: SampleDelta | BaseException) -> None:
        """Add a part, from any thread."""
        self._parts.append(part)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            with suppress(RuntimeError):  # the reader's loop was closed
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def get(self, until: float | None = None) -> SampleDelta | BaseException | None:
        """Return the next part, in the reader's loop.

        Args:
            until: When to stop waiting, in seconds of loop.time(); None: never.

        Returns:
            The part, or None if none arrived in time.
        """
        while not self._parts:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            if self._parts:  # the part arrived before the waiter existed
                break
            if until is None:
                await waiter
                continue
            timer = loop.call_at(until, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
            if not self._parts and loop.time() >= until:
                return None
        return self._parts.popleft()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class InferenceRequest:
    """A request of LLMEngine or AsyncLLMEngine; their add_request makes it, or accepts an existing one.

    Args:
        request_id: None: a new id.
        prompt: Text, or token ids.
        prompt_token_ids: The prompt's tokens, instead of the text or in addition.
        sampling_params: SamplingParams; None: the engine's defaults.

    Attributes:
        request_id, prompt, sampling_params: As given.
        arrival_time: When it was created, in seconds of time.time().
    """

    def __init__(
        self,
        request_id: str | None = None,
        prompt: Any = None,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: Any = None,
    ) -> None:
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"{_NAME}: request_id must be a string or None, got {request_id!r}")
        self.request_id = uuid4().hex if request_id is None else request_id
        self.prompt, self._prompt_token_ids, self.sampling_params = prompt, prompt_token_ids, sampling_params
        self.arrival_time = time.time()
        self._request: Request | None = None
        self._cancel: Callable[[], object] | None = None
        self._ended: FinishReason | None = None  # set by the caller or a failure; the engine may not know yet
        self._error: BaseException | None = None
        self.outbox = Outbox()
        self.added: Future[str] | None = None  # the engine's id, set by AsyncLLMEngine
        self.ended_samples: set[int] = set()  # samples whose end is in the outbox

    def __repr__(self) -> str:
        tokens = len(self.generated_token_ids)
        return f"InferenceRequest({self.request_id!r}, {self.status.value}, {tokens} tokens generated)"

    @property
    def engine_prompt(self) -> Prompt:
        """The prompt in the form of torch_infini's engine."""
        if self._prompt_token_ids is None:
            prompt: Prompt = self.prompt
            return prompt
        return {"prompt": self.prompt, "prompt_token_ids": self._prompt_token_ids}

    @property
    def is_added(self) -> bool:
        """Whether an engine has accepted it."""
        return self._request is not None

    @property
    def sample_count(self) -> int:
        """The number of samples it will have."""
        return 1 if self._request is None else self._request.params.n

    def bind(self, request: Request, cancel: Callable[[], object]) -> None:
        """Make this the view of an engine's request, which `cancel` cancels."""
        self._request, self._cancel = request, cancel

    def release(self) -> None:
        """Release the engine, after the end."""
        self._cancel = None

    def end(self, reason: FinishReason) -> None:
        """End it for its reader, before the engine does; does nothing if it has ended."""
        if not self.is_finished():
            self._ended = reason
            self.outbox.put(SampleDelta(-1, (), "", reason))

    def fail(self, error: BaseException) -> None:
        """Report a failure of the engine to its reader; no further output follows."""
        if self._ended is None:
            self._ended, self._error = FinishReason.ERROR, error
        self.outbox.put(error)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens; for a text only after an engine has accepted it."""
        return self._request.prompt if self._request is not None else list(self._prompt_token_ids or ())

    @property
    def generated_token_ids(self) -> list[int]:
        """The first sample's tokens so far."""
        return [] if self._request is None else self._request.sequences[0].output

    @property
    def generated_text(self) -> str:
        """The first sample's text so far, without a tail that later tokens may change."""
        return "" if self._request is None else self._request.sequences[0].text

    @property
    def status(self) -> RequestStatus:
        """Its state."""
        if self.is_finished():
            reason = self.finish_reason
            return RequestStatus.FINISHED if reason is None else _ENDED.get(reason, RequestStatus.FINISHED)
        is_running = self._request is not None and any(sequence.blocks for sequence in self._request.sequences)
        return RequestStatus.RUNNING if is_running else RequestStatus.WAITING

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None: it has not."""
        if self._ended is not None or self._request is None:
            return self._ended
        first = self._request.sequences[0]
        return reason_of(None if first.finish is None else first.finish.value, first.stopped_by)

    @property
    def error(self) -> str | None:
        """The error message; None: no error."""
        if self._error is not None:
            return str(self._error)
        return None if self._request is None else self._request.sequences[0].error

    def is_finished(self) -> bool:
        """Return whether no further token will follow."""
        return self._ended is not None or (self._request is not None and self._request.is_finished)

    def to_request_output(self) -> RequestOutput:
        """Return the output so far.

        Raises:
            RuntimeError: If no engine has accepted it.
        """
        if self._request is None:
            raise RuntimeError(
                f"{_NAME}.to_request_output: the request must have been added to an engine, got a new one"
            )
        return RequestOutput.of(output_of(self._request), self.request_id, self._ended)

    def abort(self, reason: FinishReason = FinishReason.CANCELED) -> bool:
        """Cancel it, from any thread; its reader gets one more TokenOutput. Return False if it was already finished."""
        cancel = self._cancel
        if self.is_finished() or cancel is None:
            return False
        self.end(reason)
        cancel()
        return True

    cancel = abort


_NAME = "infinilm.llm.InferenceRequest"
