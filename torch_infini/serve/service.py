"""Service: one AsyncLLM behind HTTP: tokenization, admission to a bounded queue, draining, health."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from .. import __version__
from ..engine import AsyncLLM, LoRARequest, PoolingParams, SamplingParams
from ..engine.sequence import Request as EngineRequest
from .errors import ApiError, bad_request, shown
from .generation import Generation
from .metrics import ServerMetrics
from .reading import Reading, reading_of
from .request_log import current_record
from .responses.store import ResponseStore
from .schemas import Message, size_of
from .settings import MAX_BODY, MAX_BODY_WITH_IMAGES, ServeSettings
from .structured import invalid_form
from .token_texts import TokenTexts
from .tool_schemas import Choice, Tool

T = TypeVar("T")
ENGINE_DEAD = "the engine has failed; the server's log has the cause"
RETRY = {"Retry-After": "1"}  # seconds
LONG = 1 << 16  # bytes of a text that take about 0.15 s to tokenize: 3.9 MB took 8 to 10 s


class ServedName(NamedTuple):
    """What a request's `model` names.

    Attributes:
        name: The name in answers.
        adapter: The adapter, or None for the model itself.
    """

    name: str
    adapter: LoRARequest | None = None


class Service:
    """The state of a server, shared by its routes.

    Args:
        llm: The engine; the caller closes it.
        settings: The server's settings.

    Attributes:
        llm, settings: As given.
        max_model_len: The most tokens of a prompt and its output.
        max_body: The most bytes of a request's body.
        capacity: The most samples in the engine, running and waiting.
        in_flight: The number of samples in the engine now.
        is_draining: Whether new requests are rejected because the server shuts down.
        metrics: The metrics of GET /metrics.
        token_texts: Texts of single tokens; None without a tokenizer.
        fingerprint: The system_fingerprint of answers.
        sampling: Fields of SamplingParams for requests that do not give them: the model's, overridden by settings'.
        adapters: The settings' adapters by name; all are loaded.
        responses: The responses that /v1/responses keeps.

    Raises:
        FileNotFoundError: For an adapter whose folder or a file of it does not exist.
        ValueError: For an adapter that the model cannot have.
    """

    def __init__(self, llm: AsyncLLM, settings: ServeSettings) -> None:
        self.llm, self.settings = llm, settings
        self.max_model_len = llm.engine.max_model_len
        reads_images = not llm.engine.prompts.images.reason
        self.max_body = settings.max_body or (MAX_BODY_WITH_IMAGES if reads_images else MAX_BODY)
        self.capacity = llm.engine.config.max_num_seqs + settings.max_queue
        self.in_flight = 0
        self.is_draining = False
        self.metrics = ServerMetrics(llm.metrics, settings.model_names[0])
        tokenizer = llm.engine.tokenizer
        self.token_texts = TokenTexts(tokenizer) if tokenizer is not None else None
        with suppress(ValueError):  # there is no tokenizer
            llm.engine.prompts.encode(
                "a"
            )  # the first call may change the tokenizer's settings; later calls use two threads
        self.sampling = {**llm.engine.sampling, **settings.sampling}
        self.fingerprint = fingerprint_of(llm)
        self.adapters = {adapter.lora_name: adapter for adapter in settings.adapters}
        for adapter in settings.adapters:
            llm.engine.load_adapter(adapter)
        self.responses = ResponseStore()
        self._generations: dict[Generation, int] = {}
        # One thread for short texts, one for long ones. Neither changes the tokenizer's settings.
        self._tokenizing = ThreadPoolExecutor(1, "torch_infini.serve tokenizer")
        self._tokenizing_long = ThreadPoolExecutor(1, "torch_infini.serve tokenizer of long texts")

    def served(self, name: str | None) -> ServedName:
        """Return what is served under a name; None is the model. ApiError for a name under which nothing is."""
        found = self._served(name)
        record = current_record()
        if record is not None:
            record.model = found.name
        return found

    def _served(self, name: str | None) -> ServedName:
        settings = self.settings
        if name in self.adapters:
            return ServedName(name, self.adapters[name])
        if name is not None and name not in settings.model_names and not settings.any_model:
            served = ", ".join((*settings.model_names, *self.adapters))
            raise ApiError(404, f"model must be {served}, got {shown(name)}", "model", "model_not_found")
        return ServedName(name if name in settings.model_names else settings.model_names[0])

    def check_health(self) -> None:
        """Raise ApiError if no request can be served."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers=RETRY)
        tp_group = self.llm.engine.model.tp_group
        workers = None if tp_group is None else tp_group.workers
        if not self.llm.is_running or (workers is not None and not workers.all_alive):
            raise ApiError(503, ENGINE_DEAD, code="engine_dead")

    async def in_tokenizer(self, call: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Return call(*args), run on a tokenizer thread, so that a long prompt does not block other requests.

        Args:
            call: Uses the tokenizer.
            *args: Its arguments.
            size: Bytes of text. Long texts have a thread of their own, so that short ones do not wait for them.
        """
        thread = self._tokenizing if size < LONG else self._tokenizing_long
        return await asyncio.get_running_loop().run_in_executor(thread, call, *args)

    async def check_text(self, size: int, param: str) -> None:
        """Raise ApiError if any text of this many bytes has too many tokens."""
        texts = self.token_texts
        if texts is None or size < self.max_model_len:
            return
        least = -(-size // await self.in_tokenizer(lambda: texts.longest, size=LONG))
        if least >= self.max_model_len:
            raise self._too_long(param, f"at least {least} for a text of {size} bytes")

    def _too_long(self, param: str, came: str) -> ApiError:
        rule = f"the prompt's tokens and those of the output must be at most {self.max_model_len} together"
        if self.llm.engine.is_encoder:
            rule = f"the text's tokens must be at most {self.max_model_len}"
        return ApiError(400, f"{rule}, the context's length, got {came}", param, "context_length_exceeded")

    async def encode(
        self, prompt: str | list[int], param: str, *, bounded: bool = True, pooling: PoolingParams | None = None
    ) -> list[int]:
        """Return a prompt's tokens; ApiError if it is too long (bounded) or the tokenizer fails.

        Args:
            prompt: A text or token ids.
            param: The field of the request that has it.
            bounded: Whether a text that must have too many tokens is rejected before it is tokenized.
            pooling: How its states become a vector; None: it is continued.
        """
        engine = self.llm.engine
        if isinstance(prompt, list):
            return prompt if pooling is None else engine.prompts.encode_pooled(prompt, pooling)
        size = bytes_in(prompt)
        # A token of an encoder's tokenizer may be an unknown word of any length.
        if bounded and not engine.is_encoder and (pooling is None or pooling.truncate_prompt_tokens is None):
            await self.check_text(size, param)
        try:
            if pooling is not None:
                return await self.in_tokenizer(engine.prompts.encode_pooled, prompt, pooling, size=size)
            return await self.in_tokenizer(engine.prompts.encode, prompt, size=size)
        except ValueError as error:
            if engine.tokenizer is None:
                raise bad_request(error, prompt=param) from None
            rule = f"{param} must be a text that the model's tokenizer takes, got {shown(prompt)}"
            raise ApiError(400, rule, param) from None

    def default_prompt(self) -> list[int]:
        """Return the prompt of a request without one: the beginning-of-sequence token; ApiError if there is none."""
        config = self.llm.engine.model.config
        tokens = [config.bos_token_id] if config.bos_token_id is not None else list(config.eos_token_ids)
        if not tokens:
            raise ApiError(400, "prompt must be given, because the model has no token that begins a text", "prompt")
        return tokens[:1]

    async def encode_all(
        self, prompts: Sequence[str | list[int]], param: str, pooling: PoolingParams | None = None
    ) -> list[list[int]]:
        """Return the tokens of several prompts; ApiError as encode."""
        return [await self.encode(prompt, param, pooling=pooling) for prompt in prompts]

    async def decode(self, prompt: str | list[int]) -> str:
        """Return a prompt's text, with special tokens if it is given as tokens; "" for tokens without a tokenizer.

        Raises:
            ApiError: If the tokenizer fails.
        """
        tokenizer = self.llm.engine.tokenizer
        if isinstance(prompt, str) or tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        decode = partial(tokenizer.decode, prompt, clean_up_tokenization_spaces=False)
        try:
            return str(await self.in_tokenizer(decode, size=len(prompt)))
        except Exception:  # tokenizers raise exceptions of any type
            rule = f"prompt must be token ids that the model's tokenizer decodes, got {shown(prompt)}"
            raise ApiError(400, rule, "prompt") from None

    async def encode_chat(
        self, messages: list[Message], template: dict[str, Any] | None = None, *, bounded: bool = True
    ) -> list[int]:
        """Return a conversation's tokens; ApiError if it is too long (bounded) or the chat template fails."""
        size = sum(size_of(message["content"]) for message in messages)
        if bounded:
            await self.check_text(size, "messages")
        try:
            # A template may write its other variables too: they are not checked for length, but may be long.
            more = len(json.dumps([template, [message.get("tool_calls") for message in messages]]))
            if not all(isinstance(message["content"], str) for message in messages):
                more += LONG  # to decode images takes long
            return await self.in_tokenizer(self.llm.chat_prompt, messages, template, size=size + more)
        except ValueError as error:
            failure = bad_request(error)
            failure.param = "messages"
            raise failure from None

    def reading(self, tools: Sequence[Tool], parallel: bool = True) -> Reading:
        """Return how the answers of a chat are read.

        Args:
            tools: The tools that the model may call.
            parallel: Whether an answer may have several calls.

        Raises:
            ApiError: If there are tools, and no calls can be read.
        """
        settings = self.settings
        tokenizer = self.llm.engine.tokenizer
        return reading_of(tokenizer, tools, parallel, settings.tool_parser, settings.reasoning_parser)

    def read_after(
        self, prompt: list[int], reading: Reading, params: SamplingParams, choice: Choice
    ) -> tuple[Reading, SamplingParams]:
        """Return how the answers to a prompt are read, and the settings that give them the form that is asked for.

        Args:
            prompt: The conversation's tokens.
            reading: The request's, before the prompt was known.
            params: The request's settings.
            choice: The request's tool_choice.

        Raises:
            ApiError: If a call is required, and the tools or other settings do not permit it.
        """
        if self.token_texts is None:
            return reading, params
        reading = reading.after(prompt, self.llm.engine.tokenizer)
        form, added = params.structured_outputs, self.token_texts.added
        try:
            if choice not in ("none", "auto"):
                form = reading.form_of_call(choice, added)
            elif form is not None:
                reading, form = reading.with_form(form, added)
            skips = params.skip_special_tokens and not reading.markers & self.token_texts.special
            return reading, replace(params, structured_outputs=form, skip_special_tokens=skips)
        except ValueError as error:
            raise bad_request(error, grammar="tools") from None

    async def compile_form(self, params: SamplingParams, field: str) -> None:
        """Compile the form of the text beside other requests; ApiError, with this field, if it is invalid."""
        if params.structured_outputs is None:
            return
        try:
            await self.in_tokenizer(self.llm.engine.compile_grammar, params, size=LONG)
        except ImportError as error:
            field = "tool_choice" if field == "tools" else field
            raise ApiError(400, f"{field} must be null on this server, got a form: {error}", field) from None
        except ValueError as error:
            raise invalid_form(error, field) from None

    def admit(self, prompts: int, params: SamplingParams, param: str, *, generates: bool = True) -> None:
        """Check that a request of this many prompts can be admitted, before they are tokenized.

        Args:
            prompts: Their number.
            params: Their settings.
            param: The field of the request that has them.
            generates: Whether they are continued, rather than embedded.

        Raises:
            ApiError: For prompts that the model cannot continue, more samples than the queue holds, a full queue, or a
                server that shuts down.
        """
        self.check_health()
        if generates and self.llm.engine.is_encoder:
            rule = "model must be a causal language model for this route, got an encoder, which has embeddings"
            raise ApiError(400, f"{rule}: POST /v1/embeddings", "model", "unsupported_task")
        samples = prompts * params.n
        if samples > self.capacity:
            raise ApiError(400, f"{param} must ask for at most {self.capacity} samples in all, got {samples}", param)
        if self.in_flight + samples > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.in_flight} samples of at most {self.capacity} are running or waiting",
                headers=RETRY,
            )

    def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        param: str,
        limit: tuple[str, int | None],
        adapter: LoRARequest | None = None,
    ) -> Generation:
        """Add prompts to the engine.

        Args:
            prompts: Token ids.
            params: The settings of all prompts.
            param: The field of the request that has the prompts.
            limit: Name and value of the field that limits the output; value None: the request has no limit.
            adapter: The adapter of all prompts, or None.

        Raises:
            ApiError: For prompts or settings that the engine rejects, a full queue, or a server that shuts down.
        """
        self.admit(len(prompts), params, param)  # again: others were admitted while these were tokenized
        name, most = limit
        engine = self.llm.engine
        size = engine.model.config.vocab_size
        for field, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if tokens and max(tokens) >= size:
                raise ApiError(400, f"{field} must name tokens from 0 to {size - 1}, got {max(tokens)}", field)
        longest = max(map(len, prompts))
        self.check_length(longest, param, most or 1, "" if most is None else f" and {name} {most}")
        try:
            requests = [engine.new_request(prompt, params, adapter) for prompt in prompts]
        except ValueError as error:
            raise bad_request(error, prompt=param) from None
        return self.start_requests(requests, param)

    def check_length(self, tokens: int, param: str, more: int = 1, came: str = "") -> None:
        """Raise ApiError if a prompt of so many tokens leaves no room for `more`."""
        if tokens + (0 if self.llm.engine.is_encoder else more) > self.max_model_len:
            raise self._too_long(param, f"{tokens}{came}")

    def start_requests(self, requests: Sequence[EngineRequest], param: str) -> Generation:
        """Add requests of Engine.new_request, which have one setting, to the engine; ApiError as start."""
        self.admit(len(requests), requests[0].params, param, generates=requests[0].pooling is None)
        samples = len(requests) * requests[0].params.n
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
        """Reject new requests from now on."""
        self.is_draining = True

    def end_all(self) -> None:
        """Cancel running requests; their answers are an error."""
        self.drain()
        for generation in list(self._generations):
            generation.fail(ApiError(503, "the server is shutting down", code="draining", headers=RETRY))

    def close(self) -> None:
        """End the tokenizer's threads."""
        self._tokenizing.shutdown(wait=False)
        self._tokenizing_long.shutdown(wait=False, cancel_futures=True)


def fingerprint_of(llm: AsyncLLM) -> str:
    """Return a name for what computes the answers: releases, the model's config and dtype, the engine's settings."""
    engine = llm.engine
    parts = (__version__, torch.__version__, engine.model.config, engine.model.dtype, engine.config)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def bytes_in(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text.encode())
