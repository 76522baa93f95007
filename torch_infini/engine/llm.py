"""LLM: the interface for scripts, as in vLLM. It loads a model and steps an Engine until all requests are finished."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import nn

from .._core.progress import track
from ..models import Llama
from .chat import MESSAGES, Message, chat_prompt
from .chat import NAME as CHAT
from .encoder import Encoder
from .engine import Engine
from .loading import load_draft, load_served
from .lora import LoRARequest
from .memory import cache_bytes_of
from .outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    Metrics,
    RequestOutput,
    ScoringRequestOutput,
    classes_of,
    embedding_of,
    of_kind,
    score_of,
)
from .pooling import SCORE, Pooling
from .prompts import Prompt
from .sampling_params import SamplingParams
from .sequence import Request
from .vllm_arguments import engine_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Output = TypeVar("Output")


class LLM:
    """A model that continues prompts, many at a time. Names are vLLM's, so that scripts change only the import.

    Args:
        model: A Hugging Face folder, a GGUF file, "owner/model" of the hub (from its cache if there is no network), a
            Llama, or a loaded causal language model of transformers, which is patched by patch_model unless it already
            is. llama, mistral, qwen2 and qwen3 folders are read into a Llama; other types run through transformers' own
            forward over the engine's cache (docs/engine.md). Quantized checkpoints: docs/checkpoints.md.
        tokenizer: A transformers tokenizer, or its folder or name; None: that of the model's folder, if it has one. A
            processor of transformers has a tokenizer too, and reads images instead of the folder's.
            Without a tokenizer, prompts are token ids. Code of the folder (auto_map) is never run: a tokenizer that
            needs it must be passed here.
        quantization: "int8" or "int4" (or another name of torch_infini.weights): linear layers are quantized to it
            while they are read; not for a folder that torch_infini.save_patched wrote with integers, which are used as
            stored. "awq", "gptq" and so on may name the checkpoint's own format. None: weights are used as stored.
        activations: "int8": layers of a quantized checkpoint quantize their input too, row by row: faster, above all
            for prompts, but tokens may differ. None: only if the checkpoint says so.
        dtype: Of activations and dense weights; "auto" or None: the checkpoint's.
        device: Where the model runs.
        tensor_parallel_size: How many ranks share the model: under torchrun its processes, which all make the same
            calls; otherwise, on the CPU, this process and others that it starts, which share its threads.
        enable_expert_parallel: Whether each rank has some experts of a mixture as a whole, and not some columns of all:
            also for quantized experts whose blocks the ranks cannot cut.
        gpu_memory_utilization: The fraction of the device's memory (a GPU's or the machine's) that the process may use;
            keys and values get what the weights leave of it. None: cache_bytes decides.
        seed: Seed of the generator that draws seeds for requests without one; None: these are random.
        generation_config: "auto": requests without params have the sampling settings of the model's
            generation_config.json; "none" (or vLLM's "vllm"): those of SamplingParams().
        runner: "auto" or "pooling": an encoder of transformers (BERT, RoBERTa, ModernBERT; docs/engine.md) computes
            embeddings and scores, other models generate and embed. "generate": BERT's types too are loaded as causal
            language models.
        progress: Whether loading shows a bar on stderr; None: if stderr is a terminal.
        **settings: Fields of EngineConfig (max_model_len, max_num_seqs, max_num_batched_tokens, enforce_eager,
            enable_prefix_caching, kv_cache_dtype, block_size, ...). Other arguments of vLLM's LLM are logged without
            effect, or raise an error that says what to use instead.

    Attributes:
        engine: The Engine.

    Raises:
        FileNotFoundError: For a folder or file that does not exist.
        ValueError: For a config, checkpoint, argument or setting that is not supported.

    Example:
        >>> llm = torch_infini.LLM("path/to/model", quantization="int8")
        >>> for output in llm.generate(["Once upon a time", "def main("], SamplingParams(max_tokens=32)):
        >>>     print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path | Llama | nn.Module,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        quantization: str | None = None,
        activations: Literal["int8"] | None = None,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str = "cpu",
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        gpu_memory_utilization: float | None = None,
        seed: int | None = None,
        generation_config: Literal["auto", "none", "vllm"] = "auto",
        runner: Literal["auto", "generate", "pooling"] = "auto",
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(settings)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise ValueError(f"torch_infini.LLM: seed must be an integer or None, got {seed!r}")
        if gpu_memory_utilization is not None and config.cache_bytes is None and config.cache_blocks is None:
            cache_bytes_of(gpu_memory_utilization, "cpu")  # rejects an invalid value before the model is read
        served, tokenizer, sampling, pooling, images = load_served(
            model,
            tokenizer,
            quantization,
            activations,
            dtype,
            device,
            tensor_parallel_size,
            "none" if generation_config == "vllm" else generation_config,
            progress,
            runner,
            enable_expert_parallel,
            config.max_images,
        )
        if isinstance(served, Encoder) and config.max_model_len is None and pooling.max_seq_length is not None:
            config = replace(config, max_model_len=min(pooling.max_seq_length, served.config.max_position_embeddings))
        sets_cache = gpu_memory_utilization is not None and not isinstance(served, Encoder)
        if sets_cache and config.cache_bytes is None and config.cache_blocks is None:
            assert gpu_memory_utilization is not None
            config = replace(config, cache_bytes=max(cache_bytes_of(gpu_memory_utilization, served.device), 1))
        guesses = config.speculative_config
        draft = None if guesses is None else load_draft(guesses, served.dtype, served.device, progress)
        self.engine = Engine(served, tokenizer, config, sampling, seed, draft)
        self.engine.prompts.pooling = pooling
        if images is not None:
            self.engine.prompts.images = images
        self._lock = threading.RLock()
        self._readers: dict[str, weakref.ref[_Reader]] = {}
        self._stepping = False
        self._delivering = False  # the last step's outputs may not all be delivered

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, as many at a time as the engine takes.

        Args:
            prompts: A text or token ids, also as {"prompt": text} or {"prompt_token_ids": ids}, or several of them.
                With images {"prompt": text, "multi_modal_data": {"image": image or images}}: images of Pillow, in the
                order of their marks in the text.
            sampling_params: For all prompts, or one for each; None: the model's defaults (generation_config).
            use_tqdm: Whether to show a progress bar, if stderr is a terminal; None: if there are several prompts.
            lora_request: The adapter of all prompts, or one (or None) for each; None: none. Needs enable_lora=True.

        Returns:
            One output for each prompt, in their order. A prompt that failed has outputs with finish_reason "error".

        Raises:
            ValueError: For a prompt that cannot be served; none is computed then.
        """
        rows = prompts_of(prompts)
        return list(with_progress(self.iterate(rows, sampling_params, lora_request), len(rows), use_tqdm))

    def iterate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of generate in order, each as soon as it is finished; leaving the loop cancels the rest.

        The prompts are checked when the loop begins.
        """
        rows = prompts_of(prompts)
        settings, adapters = params_of(sampling_params, len(rows)), adapters_of(lora_request, len(rows))
        readers: list[_Reader] = []
        try:
            for i, (prompt, one, adapter) in enumerate(zip(rows, settings, adapters, strict=True)):
                try:
                    readers.append(self._add(prompt, one, adapter, keep=1))
                except ValueError as error:
                    raise ValueError(f"{error} (prompt {i})") from None
            for reader in readers:
                yield deque(self._outputs(reader), maxlen=1).pop()
        finally:
            self._drop(readers)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, with an output for every step; leaving the loop cancels the request.

        The prompt is checked at once; the request begins with the first step of the loop.

        Args:
            prompt: One prompt, as in generate.
            sampling_params: None: the model's defaults (generation_config).
            lora_request: The prompt's adapter, or None.

        Yields:
            The output so far; its outputs' new_text and new_token_ids hold what the step added.

        Raises:
            ValueError: For a prompt that cannot be served.
        """
        with self._lock:
            request = self.engine.new_request(prompt, sampling_params, lora_request)
        return self._streamed(request)

    def _streamed(self, request: Request) -> Iterator[RequestOutput]:
        reader = self._add(request)
        try:
            for output in self._outputs(reader):
                if (shaped := of_kind(output, request.params.output_kind)) is not None:
                    yield shaped
        finally:
            self._drop([reader])

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or several such lists. Content may be a list of parts:
                {"type": "text", "text": ...}, and for images {"type": "image_url", "image_url": {"url": data URL}} or
                {"type": "image", "image": image of Pillow}.
            sampling_params, use_tqdm, lora_request: As generate.
            chat_template: Replaces the tokenizer's.
            add_generation_prompt: Whether the prompt ends with the beginning of an answer.
            continue_final_message: Whether the last message is continued instead of answered; then
                add_generation_prompt must be False.
            tools: Functions that the template may describe, as in OpenAI's API.
            chat_template_kwargs: Further variables of the template, such as enable_thinking.

        Returns:
            As generate.

        Raises:
            ValueError: If the tokenizer has no chat template, or as generate.
        """
        self.engine.check_generates()
        template = {
            **(chat_template_kwargs or {}),
            **({} if chat_template is None else {"chat_template": chat_template}),
            **({} if tools is None else {"tools": list(tools)}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self.generate(self.chat_prompts(messages, template), sampling_params, use_tqdm, lora_request)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer; None if there is none."""
        return self.engine.tokenizer

    def embed(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | SequenceOf[LoRARequest | None] | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute embeddings: the hidden states of each prompt's tokens after the last norm, pooled to one vector.

        Args:
            prompts: As generate.
            pooling: "last", "mean", "cls" (the first token), "max" or "mean_sqrt_len"; None: as the folder's
                modules.json says, or "last", of an encoder "mean".
            normalize: Whether vectors have length 1; None: as modules.json says, or True.
            dimensions: The elements to keep, if the model's config has is_matryoshka or matryoshka_dimensions; None:
                all.
            use_tqdm, lora_request: As generate.
            truncate_prompt_tokens: Keep this many of a prompt's first tokens, and of a text the special ones at its
                end; -1: as many as the model takes. None: a prompt that is too long is an error.
            prompt_name: The name of a prompt of config_sentence_transformers.json, with which texts begin; None: its
                default_prompt_name, or none.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: For a prompt or settings that cannot be served, or a model that ranks share.
            RuntimeError: If a step failed.

        Example:
            >>> [output] = llm.embed("A text")
            >>> output.outputs.embedding
        """
        params = self.engine.prompts.pooling.merge(pooling, normalize, dimensions, truncate_prompt_tokens, prompt_name)
        rows = prompts_of(prompts)
        adapters = adapters_of(lora_request, len(rows))

        def make(i: int) -> Request:
            return self.engine.new_request(rows[i], None, adapters[i], params)

        return list(with_progress(self._pooled(make, len(rows), embedding_of), len(rows), use_tqdm))

    def score(
        self,
        queries: str | SequenceOf[str],
        documents: str | SequenceOf[str],
        use_tqdm: bool | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score documents for queries with a cross-encoder, which reads both texts at once.

        Args:
            queries: One text for all documents, or one for each.
            documents: One text or several.
            use_tqdm: As generate.
            use_activation: False: logits; None: as True, what the folder's activation makes of them, or the sigmoid.
            truncate_prompt_tokens: As embed; a document loses its last tokens.

        Returns:
            One output for each document, in their order.

        Raises:
            ValueError: For a model that is no classifier with one label, or texts that cannot be served.
            RuntimeError: If a step failed.

        Example:
            >>> llm = torch_infini.LLM("path/to/ms-marco-MiniLM-L6-v2")
            >>> [output.outputs.score for output in llm.score("How tall is it?", ["It is 5 m tall.", "It is red."])]
        """
        params = self.engine.score_params(use_activation, truncate_prompt_tokens, only=1)
        pairs = pairs_of(queries, documents)

        def make(i: int) -> Request:
            ids, types = self.engine.prompts.encode_pair(*pairs[i], params)
            return self.engine.new_request(ids, None, None, params, types)

        return list(with_progress(self._pooled(make, len(pairs), score_of), len(pairs), use_tqdm))

    def classify(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        use_tqdm: bool | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Compute the probabilities of a classifier's labels for each prompt.

        Args:
            prompts, use_tqdm: As generate.
            use_activation: False: logits; None: as True, their softmax, or sigmoids where labels do not exclude each
                other or there is one.
            truncate_prompt_tokens: As embed.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: For a model that is no classifier, or prompts that cannot be served.
            RuntimeError: If a step failed.
        """
        params = self.engine.score_params(use_activation, truncate_prompt_tokens)
        rows = prompts_of(prompts)

        def make(i: int) -> Request:
            return self.engine.new_request(rows[i], None, None, params)

        return list(with_progress(self._pooled(make, len(rows), classes_of), len(rows), use_tqdm))

    def _pooled(
        self, make: Callable[[int], Request], count: int, convert: Callable[[RequestOutput], Output]
    ) -> Iterator[Output]:
        """Yield the outputs of requests that generate nothing, in order.

        Args:
            make: Returns the request of an index; ValueError for one that cannot be served.
            count: The number of requests.
            convert: Applied to each output.
        """
        requests: list[Request] = []
        for i in range(count):
            try:
                with self._lock:
                    requests.append(make(i))
            except ValueError as error:
                raise ValueError(f"{error} (prompt {i})") from None
        # An encoder pads the texts of a step to one length, so that those of about one length come together.
        order = list(range(count))
        if self.engine.is_encoder:
            order.sort(key=lambda i: len(requests[i].prompt))
        readers: dict[int, _Reader] = {}
        try:
            for i in order:
                readers[i] = self._add(requests[i], keep=1)
            for _, reader in sorted(readers.items()):
                yield convert(deque(self._outputs(reader), maxlen=1).pop())
        finally:
            self._drop(list(readers.values()))

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: states of single tokens are not returned; embeddings are those of embed."""
        raise NotImplementedError(
            "torch_infini.LLM: models generate, embed, score and classify; states of single tokens are not returned"
        )

    def chat_prompts(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        template: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Return the tokens of each conversation; arguments and errors are those of chat."""
        conversations: Any = messages  # checked here and by chat_prompt
        if isinstance(conversations, SequenceOf) and conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        if not isinstance(conversations, SequenceOf) or isinstance(conversations, (str, bytes)):
            raise ValueError(f"{CHAT}: {MESSAGES}, or a list of such lists, got {messages!r}")
        return [self.chat_prompt(conversation, template) for conversation in conversations]

    def chat_prompt(self, messages: SequenceOf[Message], template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the tokens of a conversation up to the assistant's answer, a PromptWithImages if it has images.

        Args:
            messages: One conversation, as in chat.
            template: Variables of the chat template besides the messages, such as enable_thinking.

        Raises:
            ValueError: If there is no chat template, or it rejects the messages.
        """
        return chat_prompt(self.engine.prompts, messages, template)

    def step(self) -> list[RequestOutput]:
        """Step the engine, for a caller that has added requests to it; outputs of other requests are delivered too.

        Returns:
            As Engine.step.
        """
        with self._lock:
            self._step()
            return list(self.engine.outputs)

    def follow(self) -> None:
        """Compute the steps of the AsyncLLM of rank 0: what the other ranks of torchrun call, until that is closed.

        Raises:
            ValueError: Without torchrun, or on rank 0.
            RuntimeError: If rank 0 ends without closing its AsyncLLM.
        """
        tp_group = self.engine.model.tp_group
        if tp_group is None or tp_group.workers is not None or tp_group.rank == 0:
            came = "no torchrun" if tp_group is None or tp_group.workers is not None else "rank 0"
            raise ValueError(f"torch_infini.LLM.follow: the rank must be one of torchrun's above 0, got {came}")
        self.engine.follow()

    def metrics(self) -> Metrics:
        """The engine's Metrics."""
        return self.engine.metrics()

    def _add(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        keep: int | None = None,
    ) -> _Reader:
        """Add a request; its reader keeps the last `keep` outputs that were not taken yet, or all of them."""
        with self._lock:
            request = prompt if isinstance(prompt, Request) else self.engine.new_request(prompt, params, lora_request)
            reader = _Reader(self.engine.new_id(), keep)
            self._readers[reader.id] = weakref.ref(reader)
            try:
                self.engine.submit(request, reader.id)
                return reader
            except BaseException:
                reader.is_closed = True
                raise

    def _outputs(self, reader: _Reader) -> Iterator[RequestOutput]:
        """Yield a request's outputs; step the engine, for all requests, while none is there."""
        while True:
            with self._lock:
                while not reader.outputs:
                    self._step()
                    if not reader.outputs and not self.engine.has(reader.id):
                        raise RuntimeError(
                            "torch_infini.LLM: the engine must be stepped only by the LLM while it has requests, got a "
                            f"step of another caller, which received the last output of request {reader.id}"
                        )
                output = reader.take()
            yield output
            if output.finished:
                return

    def _step(self) -> None:
        """Step the engine and deliver the outputs, after those of a step that was interrupted before delivery."""
        self._cancel_dropped()
        self._stepping = True
        try:
            interrupted, self._delivering = self._delivering, True
            if interrupted:
                self._deliver(self.engine.outputs)
            self._deliver(self.engine.step())
            self._delivering = False
        finally:
            self._stepping = False

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            reader = self._readers[output.request_id]() if output.request_id in self._readers else None
            if reader is not None:
                reader.put(output)

    def _cancel_dropped(self) -> None:
        """Cancel the requests whose readers are closed or deleted.

        Deletion itself cannot do this: the garbage collector may run in the middle of a step, and be interrupted.
        """
        for id, reference in list(self._readers.items()):
            reader = reference()
            if reader is None or reader.is_closed:
                self.engine.abort(id)
                self._readers.pop(id, None)

    def _drop(self, readers: SequenceOf[_Reader]) -> None:
        """Close readers; unfinished requests are cancelled, at once unless the engine is in a step."""
        for reader in readers:
            reader.is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._stepping:  # otherwise this thread is within a step
                    self._cancel_dropped()
            finally:
                self._lock.release()


class _Reader:
    """The caller's side of a request: the outputs that were not taken yet. Dropping it cancels the request."""

    def __init__(self, id: str, keep: int | None) -> None:
        self.id, self.is_closed = id, False
        self.outputs: deque[RequestOutput] = deque(maxlen=keep)
        self._taken: RequestOutput | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output, unless it was added before."""
        last = self.outputs[-1] if self.outputs else self._taken
        if last is None or output.progress > last.progress:
            self.outputs.append(output)

    def take(self) -> RequestOutput:
        self._taken = self.outputs[0]
        return self.outputs.popleft()


def adapters_of(given: Any, count: int) -> SequenceOf[LoRARequest | None]:
    """Return the adapters of `count` prompts, from one for all or one for each; ValueError for anything else."""
    if not isinstance(given, SequenceOf) or isinstance(given, str):
        alike: list[Any] = [given] * count  # another type is rejected with the first prompt
        return alike
    if len(given) != count:
        raise ValueError(
            "torch_infini.LLM.generate: lora_request must be one for all or one for each of "
            f"{count} prompts, got {len(given)}"
        )
    return given


def with_progress(outputs: Iterator[Output], count: int, use_tqdm: bool | None) -> Iterator[Output]:
    """Return an iterator of the outputs that shows a progress bar on stderr, if that is a terminal."""
    if use_tqdm is False or (use_tqdm is None and count < 2):
        return outputs
    return track(outputs, "prompts", [1] * count)


def pairs_of(queries: Any, documents: Any) -> list[tuple[str, str]]:
    """Return the pairs of a query for all documents, or one for each; ValueError for anything else."""
    lists = [[given] if isinstance(given, str) else given for given in (queries, documents)]
    for name, texts in zip(("queries", "documents"), lists, strict=True):
        if not isinstance(texts, SequenceOf) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{SCORE}: {name} must be a text or a list of texts, got {texts!r}")
    first, second = lists
    if len(first) not in (1, len(second)):
        raise ValueError(
            f"{SCORE}: queries must be one for all or one for each of {len(second)} documents, got {len(first)}"
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def prompts_of(given: Any) -> SequenceOf[Prompt]:
    """Return one prompt or several as a list; ValueError for what is neither."""
    if is_prompt(given):
        return [given]
    rows = len(getattr(given, "shape", ())) > 1
    if not (isinstance(given, SequenceOf) or rows) or isinstance(given, (bytes, bytearray)):
        raise ValueError(f"torch_infini.LLM.generate: prompts must be a list of texts or token ids, got {given!r}")
    return given


def params_of(given: Any, count: int) -> SequenceOf[SamplingParams | None]:
    """Return the settings of `count` prompts, from one for all or one for each; ValueError for anything else."""
    name = "torch_infini.LLM.generate"
    if given is None or isinstance(given, (SamplingParams, str, Mapping)):
        alike: list[Any] = [given] * count  # another type is rejected with the first prompt
        return alike
    if not isinstance(given, SequenceOf):
        raise ValueError(
            f"{name}: sampling_params must be SamplingParams, None, or a list of one for each prompt, got {given!r}"
        )
    if len(given) != count:
        raise ValueError(
            f"{name}: sampling_params must be one for all or one for each of {count} prompts, got {len(given)}"
        )
    return given


def is_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is one prompt rather than several: a text, a mapping, or numbers."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if hasattr(prompts, "shape"):  # of torch or numpy: its elements are ids, its rows prompts
        return len(prompts.shape) == 1
    if not isinstance(prompts, SequenceOf) or isinstance(prompts, (bytes, bytearray)) or len(prompts) == 0:
        return False
    return hasattr(prompts[0], "__index__") and len(getattr(prompts[0], "shape", ())) == 0
