"""Service: one AsyncLLM behind HTTP: prompts to tokens, admission to a bounded queue, draining, health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..engine import AsyncLLM, SamplingParams
from .errors import ApiError, bad_request, shown
from .generation import Generation
from .metrics import ServerMetrics
from .schemas import Message
from .settings import ServeSettings
from .token_texts import TokenTexts

T = TypeVar("T")
ENGINE_DEAD = "the engine has failed; the server's log has the cause"
RETRY = {"Retry-After": "1"}  # seconds


class Service:
    """What the routes share.

    Args:
        llm: The engine; the caller closes it.
        settings: Of the server.

    Attributes:
        llm, settings: As given.
        max_length: The most tokens of a prompt and its output.
        capacity: The most samples in the engine, running and waiting.
        in_flight: How many there are.
        is_draining: Whether new requests are refused because the server ends.
        metrics: What /metrics answers.
        token_texts: Texts of single tokens; None without a tokenizer.
    """

    def __init__(self, llm: AsyncLLM, settings: ServeSettings) -> None:
        self.llm, self.settings = llm, settings
        self.max_length = llm.engine.max_length
        self.capacity = llm.engine.config.max_sequences + settings.max_queue
        self.in_flight = 0
        self.is_draining = False
        self.metrics = ServerMetrics(llm.metrics, settings.model_names[0])
        tokenizer = llm.engine.tokenizer
        self.token_texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._generations: dict[Generation, int] = {}
        # One thread: a tokenizer of transformers may not be used by several where it changes its settings.
        self._tokenizing = ThreadPoolExecutor(1, "torch_infini.serve tokenizer")

    @property
    def model(self) -> str:
        """The name that answers have."""
        return self.settings.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served; None stands for the one that is."""
        if name is not None and name not in self.settings.model_names and not self.settings.any_model:
            served = ", ".join(self.settings.model_names)
            raise ApiError(404, f"model must be {served}, got {shown(name)}", "model", "model_not_found")

    def check_health(self) -> None:
        """Raise ApiError if no request can be served."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers=RETRY)
        tp_group = self.llm.engine.model.tp_group
        workers = None if tp_group is None else tp_group.workers
        if not self.llm.is_running or (workers is not None and not workers.all_alive):
            raise ApiError(503, ENGINE_DEAD, code="engine_dead")

    async def in_tokenizer(self, call: Callable[..., T], *args: Any) -> T:
        """Return call(*args), run by the tokenizer's thread, so that a long prompt does not stop other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call, *args)

    async def encode(self, prompt: str | list[int], param: str) -> list[int]:
        """Return a prompt's tokens; ApiError if the tokenizer does not take it."""
        if isinstance(prompt, list):
            return prompt
        try:
            return await self.in_tokenizer(self.llm.engine.encode, prompt)
        except ValueError as error:
            if self.llm.engine.tokenizer is None:
                raise bad_request(error, prompt=param) from None
            rule = f"{param} must be a text that the model's tokenizer takes, got {shown(prompt)}"
            raise ApiError(400, rule, param) from None

    async def encode_chat(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation; ApiError if the chat template does not take it."""
        try:
            return await self.in_tokenizer(self.llm.chat_prompt, messages)
        except ValueError as error:
            failure = bad_request(error)
            failure.param = "messages"
            raise failure from None

    def start(
        self, prompts: Sequence[list[int]], params: SamplingParams, param: str, limit: tuple[str, int | None]
    ) -> Generation:
        """Give prompts to the engine.

        Args:
            prompts: Token ids.
            params: Of all of them.
            param: The field that the prompts came in.
            limit: Name and value of the field that limits the output; None: the request does not say.

        Raises:
            ApiError: For prompts or settings that the engine does not take, a full queue, a server that ends.
        """
        self.check_health()
        name, most = limit
        engine = self.llm.engine
        if params.n > engine.config.max_sequences:
            raise ApiError(400, f"n must be at most {engine.config.max_sequences}, got {params.n}", "n")
        size = engine.model.config.vocab_size
        for field, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if tokens and max(tokens) >= size:
                raise ApiError(400, f"{field} must name tokens from 0 to {size - 1}, got {max(tokens)}", field)
        longest = max(map(len, prompts))
        if longest + (most or 1) > self.max_length:
            wanted = f"{longest}" if most is None else f"{longest} and {name} {most}"
            raise ApiError(
                400,
                f"the prompt's tokens and those of the output must be at most {self.max_length} together, the "
                f"context's length, got {wanted}",
                param,
                "context_length_exceeded",
            )
        try:
            requests = [engine.new_request(prompt, params) for prompt in prompts]
        except ValueError as error:
            raise bad_request(error, prompt=param) from None
        samples = len(prompts) * params.n
        if samples > self.capacity:
            raise ApiError(400, f"{param} must ask for at most {self.capacity} samples in all, got {samples}", param)
        if self.in_flight + samples > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.in_flight} samples of at most {self.capacity} are running or waiting",
                headers=RETRY,
            )
        self.in_flight += samples
        try:
            generation = Generation(self.llm, requests, self.metrics, self._ended)
        except RuntimeError:  # the engine has ended since check_health
            self.in_flight -= samples
            raise ApiError(503, ENGINE_DEAD, code="engine_dead") from None
        self._generations[generation] = samples
        return generation

    def _ended(self, generation: Generation) -> None:
        self.in_flight -= self._generations.pop(generation, 0)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True

    def end_all(self) -> None:
        """End what still runs, with an error."""
        self.drain()
        for generation in list(self._generations):
            generation.fail(ApiError(503, "the server is shutting down", code="draining", headers=RETRY))

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._tokenizing.shutdown(wait=False)
