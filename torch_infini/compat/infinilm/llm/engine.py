"""LLMEngine: torch_infini's engine with InfiniLM's configuration and requests, for callers that run its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ....engine import LLM as EngineLLM
from ....engine import Metrics
from ....engine.chat import Message
from ....engine.prompts import Prompt
from ....engine.sequence import Request
from .config import EngineConfig
from .request import InferenceRequest
from .sampling_params import resolved
from .scheduler import SchedulerView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME = "infinilm.llm.LLMEngine"


class TakesRequests(ABC):
    """add_request, add_chat_request and abort, shared by LLMEngine and AsyncLLMEngine."""

    _requests: dict[str, InferenceRequest]  # unfinished requests

    def add_request(
        self,
        prompt: str | Sequence[int] | InferenceRequest | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: Any = None,
        request_id: str | None = None,
    ) -> InferenceRequest:
        """Add a request and return at once; the next step starts to compute it.

        Args:
            prompt: Text, which needs a tokenizer, or token ids; or an InferenceRequest, which contains the other three.
            prompt_token_ids: Instead of the text, or in addition.
            sampling_params: None: the config's.
            request_id: None: a new id.

        Returns:
            The request, whose attributes change with each step; AsyncLLMEngine.stream_request reads it.

        Raises:
            ValueError: For an invalid prompt, settings or id; other requests are not affected.
            RuntimeError: If an AsyncLLMEngine is not running.
        """
        where = f"infinilm.llm.{type(self).__name__}.add_request"
        if not isinstance(prompt, InferenceRequest):
            request = InferenceRequest(request_id, prompt, prompt_token_ids, sampling_params)
        elif (prompt_token_ids, sampling_params, request_id) != (None, None, None):
            raise ValueError(f"{where}: the other arguments must be None where an InferenceRequest is given")
        elif prompt.is_added or prompt.is_finished():
            raise ValueError(f"{where}: a request must be added once, got {prompt!r}")
        else:
            request = prompt
        self._add(request)
        return request

    def add_chat_request(
        self, messages: Sequence[Message], sampling_params: Any = None, request_id: str | None = None
    ) -> InferenceRequest:
        """Add a request that answers a conversation, [{"role": "user", "content": "..."}, ...]; otherwise like
        add_request.
        """
        return self.add_request(None, self._chat_prompt(messages), sampling_params, request_id)

    def abort(self, request: InferenceRequest | str) -> bool:
        """Cancel a request, given by itself or its id. Return False if it is unknown or finished.

        An AsyncLLMEngine's can be cancelled from any thread.
        """
        found = self._requests.get(request.request_id if isinstance(request, InferenceRequest) else request)
        return found is not None and found.abort()

    abort_request = cancel = abort

    @abstractmethod
    def _add(self, request: InferenceRequest) -> None: ...

    @abstractmethod
    def _chat_prompt(self, messages: Sequence[Message]) -> list[int]: ...


class LLMEngine(TakesRequests):
    """Many requests on one model, step by step; for one thread at a time.

    Args:
        config: EngineConfig.

    Attributes:
        config: The given config.
        llm: The torch_infini.LLM that does the work; llm.engine is its Engine.

    Raises:
        FileNotFoundError: For a folder or file that does not exist.
        ValueError: For an unsupported config, checkpoint or setting.
        MemoryError: For a cache that does not fit into memory.

    Example:
        >>> engine = LLMEngine(EngineConfig("path/to/model"))
        >>> request = engine.add_request("Once upon a time", sampling_params=SamplingParams(max_tokens=32))
        >>> while engine.has_unfinished_requests():
        >>>     engine.step()
        >>> print(request.generated_text)
    """

    def __init__(self, config: EngineConfig) -> None:
        if not isinstance(config, EngineConfig):
            raise ValueError(f"{_NAME}: config must be an EngineConfig, got {config!r}")
        self.config = config
        self.llm = EngineLLM(**config.arguments())
        self._requests: dict[str, InferenceRequest] = {}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; None if its folder has none."""
        return self.llm.engine.tokenizer

    @property
    def scheduler(self) -> SchedulerView:
        """The waiting and running sequences, and the cache's blocks; read between steps."""
        return SchedulerView(self.llm.engine.scheduler)

    def new_request(self, prompt: Prompt, params: Any) -> Request:
        """Make the engine's request; ValueError for an invalid prompt or settings."""
        return self.llm.engine.new_request(prompt, resolved(params, self.config.default_params()))

    def _add(self, request: InferenceRequest) -> None:
        made = self.new_request(request.engine_prompt, request.sampling_params)
        id = self.llm.engine.add(made, id=request.request_id)
        request.bind(made, partial(self.llm.engine.abort, id))
        self._requests[id] = request

    def _chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.llm.chat_prompt(messages)

    def step(self) -> list[InferenceRequest]:
        """Compute one step.

        Returns:
            The requests that have new tokens or are finished.
        """
        changed = []
        for output in self.llm.step():
            request = self._requests.get(output.request_id)
            if request is not None:  # not one of the LLM's own
                changed.append(request)
                if output.finished:
                    del self._requests[output.request_id]
        if self._requests and self.llm.engine.is_idle:  # finished in steps that the LLM took
            changed += self._requests.values()
            self._requests.clear()
        return changed

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is unfinished, or step has not returned its end yet."""
        return bool(self._requests)

    has_unfinished = has_unfinished_requests

    def metrics(self) -> Metrics:
        """The engine's Metrics."""
        return self.llm.metrics()
