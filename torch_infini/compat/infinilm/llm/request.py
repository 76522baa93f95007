"""InferenceRequest: a request, and a view of what the engine has generated for it; the outputs that callers get.

The state of a request is the engine's own Request: nothing is kept twice, and a token costs nothing here until somebody
reads it.
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
from ....engine.engine import Prompt
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
    """What became of a request."""

    WAITING = "waiting"  # for a place in the batch, at first or after it was preempted
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
    """Return why a sample ended, from the engine's two words for it; None: it goes on."""
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
        request_id: The request's.
        token_id: None where the output ended without a further token.
        token_text: The text that it added, "" for an end token; text that may belong to a later token's character or
            stop string comes with that one.
        finished: Whether it is the sample's last.
        finish_reason: Why; None where it is not the last.
        generated_text: The text so far.
        index: Of the sample.
    """

    request_id: str
    token_id: int | None
    token_text: str
    finished: bool
    finish_reason: FinishReason | None
    generated_text: str
    index: int = 0


class SampleDelta(NamedTuple):
    """What a step added to a sample: tokens, text, and why it ended. Sample -1: none, all of the request ended."""

    sample: int
    tokens: Sequence[int]
    text: str
    reason: FinishReason | None


class Outbox:
    """Parts on their way from the engine's thread to one reader in any event loop."""

    def __init__(self) -> None:
        self._parts: deque[SampleDelta | BaseException] = deque()
        self._waiter: asyncio.Future[None] | None = None  # replaced by the reader, and by nobody else
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
            until: When to give up, in seconds of loop.time(); None: never.

        Returns:
            None if none came until then.
        """
        while not self._parts:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            if self._parts:  # it came before the waiter was there
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
    """A request of LLMEngine or AsyncLLMEngine; their add_request makes it, or takes one that is made.

    Args:
        request_id: None: a new one.
        prompt: Text, or token ids.
        prompt_token_ids: The prompt's tokens, instead of the text or beside it.
        sampling_params: SamplingParams; None: the engine's defaults.

    Attributes:
        request_id, prompt, sampling_params: As given.
        arrival_time: When it was made, in seconds of time.time().
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
        self._ended: FinishReason | None = None  # by the caller or a failure; the engine may not know yet
        self._error: BaseException | None = None
        self.outbox = Outbox()
        self.added: Future[str] | None = None  # the engine's id, by AsyncLLMEngine
        self.told: set[int] = set()  # samples whose end is in the outbox

    def __repr__(self) -> str:
        tokens = len(self.generated_token_ids)
        return f"InferenceRequest({self.request_id!r}, {self.status.value}, {tokens} tokens generated)"

    @property
    def engine_prompt(self) -> Prompt:
        """The prompt as torch_infini's engine takes it."""
        if self._prompt_token_ids is None:
            prompt: Prompt = self.prompt
            return prompt
        return {"prompt": self.prompt, "prompt_token_ids": self._prompt_token_ids}

    @property
    def is_added(self) -> bool:
        """Whether an engine has taken it."""
        return self._request is not None

    @property
    def sample_count(self) -> int:
        """How many samples it will have."""
        return 1 if self._request is None else self._request.params.n

    def bind(self, request: Request, cancel: Callable[[], object]) -> None:
        """Make this the view of an engine's request, which `cancel` cancels."""
        self._request, self._cancel = request, cancel

    def release(self) -> None:
        """Let go of the engine, after the end."""
        self._cancel = None

    def end(self, reason: FinishReason) -> None:
        """End it for its reader, before the engine does; nothing if it has ended."""
        if not self.is_finished():
            self._ended = reason
            self.outbox.put(SampleDelta(-1, (), "", reason))

    def fail(self, error: BaseException) -> None:
        """Give its reader an error of the engine itself, after which no output comes."""
        if self._ended is None:
            self._ended, self._error = FinishReason.ERROR, error
        self.outbox.put(error)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens; of a text only once an engine has taken it."""
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
        """What became of it."""
        if self.is_finished():
            reason = self.finish_reason
            return RequestStatus.FINISHED if reason is None else _ENDED.get(reason, RequestStatus.FINISHED)
        is_running = self._request is not None and any(sequence.blocks for sequence in self._request.sequences)
        return RequestStatus.RUNNING if is_running else RequestStatus.WAITING

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None: it goes on."""
        if self._ended is not None or self._request is None:
            return self._ended
        first = self._request.sequences[0]
        return reason_of(None if first.finish is None else first.finish.value, first.stopped_by)

    @property
    def error(self) -> str | None:
        """What went wrong; None: nothing."""
        if self._error is not None:
            return str(self._error)
        return None if self._request is None else self._request.sequences[0].error

    def is_finished(self) -> bool:
        """Return whether no further token will come."""
        return self._ended is not None or (self._request is not None and self._request.is_finished)

    def to_request_output(self) -> RequestOutput:
        """Return the output so far.

        Raises:
            RuntimeError: If no engine has taken it.
        """
        if self._request is None:
            raise RuntimeError(
                f"{_NAME}.to_request_output: the request must have been added to an engine, got a new one"
            )
        return RequestOutput.of(output_of(self._request), self.request_id, self._ended)

    def abort(self, reason: FinishReason = FinishReason.CANCELED) -> bool:
        """Cancel it, from any thread; its reader gets one more TokenOutput. False if it was finished already."""
        cancel = self._cancel
        if self.is_finished() or cancel is None:
            return False
        self.end(reason)
        cancel()
        return True

    cancel = abort


_NAME = "infinilm.llm.InferenceRequest"
