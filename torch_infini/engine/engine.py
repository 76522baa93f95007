"""Engine: many requests on one model, step by step. Each step computes the chunks that the scheduler chose, samples a
token for every sequence whose tokens are all computed, and returns the outputs of the requests that changed.

The engine has no loop of its own: LLM calls step() until all requests are finished, AsyncLLM does so on a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed import Followers, follow
from ..nn import KVCache, MixedKVCache
from .blocks import BlockManager
from .config import CACHE_BYTES, EngineConfig
from .draft_model import ModelDrafts
from .encoder import Encoder, EncoderRunner, NoCache, encoder_config
from .errors import described
from .grammar import Grammars, Matcher
from .images import PromptWithImages, keys_of
from .lora import AdapterSlots, LoRARequest
from .model import ServedModel, is_served_model
from .outputs import Finish, Metrics, RequestOutput, TokenLogprobs
from .pooling import SCORE, PoolingParams, ScoreParams
from .prompts import Prompt, Prompts, parts_of
from .runner import ChunkInput, Runner, TPRunner
from .sampler import Row, Sampled, Sampler, log_softmax, most_likely, resolve_seeds
from .sampling_params import SamplingParams
from .scheduler import ScheduledChunk, Scheduler
from .sequence import Request, Sequence, output_of
from .speculation import Drafts, is_decode
from .states import StateRows
from .text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POOLED = SamplingParams(max_tokens=1, detokenize=False)  # of embeddings, which generate nothing
_NAME = "torch_infini.Engine"
_logger = logging.getLogger("torch_infini")
_UNREADABLE = f"{_NAME}: the tokenizer must decode every token of the prompt and the output"


class Engine:
    """Serves requests with one model; one thread may use it at a time.

    Args:
        model: On the device where it runs.
        tokenizer: A transformers tokenizer; None: prompts are token ids, and there are no texts or stop strings.
        config: Limits; None: EngineConfig().
        sampling: Fields of SamplingParams for requests without params, as sampling_defaults returns them.
        seed: Seed of the generator that draws seeds for requests without one; None: these are random.
        draft: The draft model of a speculative_config that has one.

    Attributes:
        model, config, sampling: As given.
        prompts: Tokenizes and checks prompts.
        max_model_len: The most tokens of a sequence.
        is_encoder: Whether the model generates nothing: its texts are computed whole, and nothing is cached.
        scheduler: The Scheduler, whose state callers may read between calls.
        outputs: What the last step returned, or would have returned if it had not been interrupted.

    A call may be interrupted anywhere (KeyboardInterrupt). The next call then frees all blocks and recomputes the
    unfinished requests from their tokens: no request is lost, and no token changes.

    Raises:
        ValueError: If the cache is too small for a single block, or max_model_len beyond the model's positions.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        draft: ServedModel | None = None,
    ) -> None:
        if not is_served_model(model) and not isinstance(model, Encoder):
            raise ValueError(
                f"{_NAME}: model must be a torch_infini.models.Decoder or PagedModel, got {type(model).__name__}"
            )
        if config is not None and not isinstance(config, EngineConfig):
            raise ValueError(f"{_NAME}: config must be an EngineConfig or None, got {config!r}")
        self.model, self.config = model, config or EngineConfig()
        self.sampling = dict(sampling or {})
        self._default_params = SamplingParams(**self.sampling)
        c, positions = self.config, model.config.max_position_embeddings
        if c.max_model_len is not None and c.max_model_len > positions:
            raise ValueError(
                f"{_NAME}: max_model_len must be at most the model's positions, {positions}, got {c.max_model_len}"
            )
        length = c.max_model_len or positions
        self.is_encoder = isinstance(model, Encoder)
        if self.is_encoder:
            self.config = c = encoder_config(c, length, model.config.model_type)  # type: ignore[attr-defined]  # has it
        blocks = self._count_blocks(length, 0 if draft is None else draft.bytes_per_token(draft.dtype))
        self.max_model_len = min(length, blocks * c.block_size)
        self.prompts = Prompts(tokenizer, model.config.vocab_size, self.max_model_len, self.is_encoder)
        self._adapters = AdapterSlots(model, c) if c.enable_lora else None
        try:
            states = self._state_rows(blocks)
            rows = 0 if states is None else states.sequences + states.prefixes
            self._blocks = BlockManager(blocks, c.block_size, c.enable_prefix_caching)
            self._cache: KVCache | MixedKVCache | NoCache
            self._runner: Runner | TPRunner | EncoderRunner
            if isinstance(model, Encoder):
                self._cache, self._runner = NoCache(c.block_size), EncoderRunner(model)
            else:
                self._cache = model.new_cache(blocks, c.block_size, self._cache_dtype, rows)
                self._runner = Runner(
                    model,
                    self._cache,
                    c.max_rows,
                    self.max_model_len,
                    not c.enforce_eager,
                    None if self._adapters is None else self._adapters.adapters,
                )
        except (OSError, RuntimeError, MemoryError, OverflowError, TypeError) as error:
            raise MemoryError(
                f"{_NAME}: cache and batch must fit into memory, got {blocks} blocks of {c.block_size} tokens and "
                f"max_num_seqs {c.max_num_seqs} (lower cache_bytes or max_num_seqs): " + str(error).partition("\n")[0]
            ) from error
        self.scheduler = Scheduler(
            self._blocks,
            c.max_num_seqs,
            c.max_num_batched_tokens,
            c.chunk_size or chunk_size_of(model),
            c.reuse_generated,
            states,
        )
        self._drafts = self._make_drafts(draft)
        self._seeds = None if seed is None else torch.Generator().manual_seed(seed % 2**63)
        if model.tp_group is not None and model.tp_group.workers is not None:
            sizes = blocks, c.block_size, self._cache_dtype, rows, c.max_rows, self.max_model_len
            adapters = (c.max_loras, c.max_lora_rank) if c.enable_lora else None
            model.tp_group.workers.send("start", *sizes, not c.enforce_eager, adapters)
            self._runner = TPRunner(self._runner, model.tp_group.workers)  # type: ignore[arg-type]  # a Runner
        elif model.tp_group is not None:  # all ranks make the same calls and must draw the same seeds
            self._seeds = self._seeds or model.tp_group.generator()
        self._sampler = Sampler()
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._step_bytes = model.bytes_per_step
        self._requests: dict[str, Request] = {}
        self._changed: dict[Request, None] = {}  # since the last step; the next one returns their outputs
        self._broken = False  # the last call was interrupted: _repair must run first
        self._returned = True  # whether the caller has `outputs`
        self.outputs: list[RequestOutput] = []
        self._metrics = Metrics(blocks=blocks)
        self._number = 0

    def call_before_compute(self, call: Callable[[], object]) -> None:
        """Have every step call this when its inputs are made, before the model computes; it must not raise.

        What it wakes runs beside the computation, and not beside the Python of the step, which would wait for it.
        """
        self._runner.before_compute = call

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """That of the prompts, which also decodes outputs."""
        return self.prompts.tokenizer

    @property
    def _cache_dtype(self) -> torch.dtype:
        return torch.int8 if self.config.kv_cache_dtype == "int8" else self.model.dtype

    def _make_drafts(self, draft: ServedModel | None) -> Drafts | None:
        model, config = self.model, self.config.speculative_config
        if config is None:
            return None
        if model.bytes_per_sequence or model.rotary_switch is not None:
            kept = "keeps states" if model.bytes_per_sequence else "changes its rotation"
            raise ValueError(f"{_NAME}: speculative_config must be None for a model that {kept}, got {config!r}")
        if config.model is None:
            ranks = model.tp_group  # of torchrun, without workers: all of them schedule
            return Drafts(config, self._blocks, ranks is None or ranks.workers is not None)
        if draft is None or model.tp_group is not None:
            rule = "draft must be given" if draft is None else "tensor_parallel_size must be 1"
            raise ValueError(f"{_NAME}: {rule} for a speculative_config with a model, got {config!r}")
        vocabulary, record = model.config.vocab_size, not self.config.enforce_eager
        return ModelDrafts(config, self._blocks, draft, vocabulary, self.max_model_len, record)

    def _guessed(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Add guesses to a step; without any for good if that fails."""
        if self._drafts is None:
            return chunks
        try:
            return self._drafts.added_to(chunks, self.scheduler.copies)
        except Exception as error:
            _logger.warning("%s: no tokens are guessed any more: %s", _NAME, described(error))
            self._drafts = None
            return chunks

    def _state_rows(self, blocks: int) -> StateRows | None:
        """Make the rows of the model's states, if it keeps any; states of prefixes may take a quarter of the cache."""
        c, size = self.config, self.model.bytes_per_sequence
        if not size:
            return None
        bytes = blocks * c.block_size * self.model.bytes_per_token(self._cache_dtype)
        return StateRows(c.max_num_seqs, bytes // 4 // size if c.enable_prefix_caching else 0)

    def _count_blocks(self, length: int, draft_bytes: int) -> int:
        size = self.config.block_size
        if self.config.cache_blocks is not None:
            return self.config.cache_blocks
        block_bytes = size * (self.model.bytes_per_token(self._cache_dtype) + draft_bytes)
        wanted = self.config.max_num_seqs * -(-length // size) * block_bytes
        budget = self.config.cache_bytes or min(wanted, CACHE_BYTES)
        if budget < block_bytes:
            raise ValueError(f"{_NAME}: cache_bytes must be at least {block_bytes}, the size of a block, got {budget}")
        return budget // block_bytes

    def add(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None = None,
        id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Add a request; the next steps compute it.

        Args:
            prompt: Text, which needs a tokenizer, or token ids; also as {"prompt": text} or {"prompt_token_ids": ids}.
                With images {"prompt": text, "multi_modal_data": {"image": image or images}}, images of Pillow. Or a
                Request of new_request, which has its own params.
            params: None: the model's defaults, SamplingParams(**self.sampling).
            id: The request's id; None: a new one.
            lora_request: The request's adapter, which is read if no slot has it; None: none. Needs enable_lora.

        Returns:
            The id.

        Raises:
            FileNotFoundError: If an adapter's folder or a file of it does not exist.
            ValueError: For a prompt or settings of another type, an empty prompt, one that leaves no room for a token,
                ids outside the vocabulary, a text that the tokenizer fails on, an id that is in use, or an adapter that
                the model cannot have. Other requests are not affected.
        """
        request = prompt if isinstance(prompt, Request) else self.new_request(prompt, params, lora_request)
        if id is not None and not isinstance(id, str):
            raise ValueError(f"{_NAME}: id must be a string or None, got {id!r}")
        if id in self._requests:
            raise ValueError(f"{_NAME}: id must not be that of an unfinished request, got {id!r}")
        return self.submit(request, self.new_id() if id is None else id)

    def new_id(self) -> str:
        """Make an id that no request has had."""
        self._number += 1
        id = str(self._number)
        while id in self._requests:  # the caller chose this one for another request
            id += "'"
        return id

    def new_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
        types: SequenceOf[int] | None = None,
    ) -> Request:
        """Make a Request for submit; arguments and errors are those of add.

        With pooling, nothing is generated: the request's only output has the vector of its prompt, or a classifier's
        scores (ScoreParams). Such a request must have no params. `types` are the
        token_type_ids of the prompt, which must be token ids then.
        """
        if pooling is None:
            self.check_generates()
        params = POOLED if pooling is not None else self._default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{_NAME}: params must be SamplingParams or None, got {params!r}")
        prompt = self.prompts.with_images(prompt)
        images = prompt if isinstance(prompt, PromptWithImages) else None
        text, ids = parts_of(prompt)
        if images is not None:
            self._check_images(params, pooling)
            text = images.text
        if pooling is not None:
            ids = self.prompts.encode_pooled(text if ids is None else ids, pooling)  # type: ignore[arg-type]  # one is not None
        elif ids is None:
            assert text is not None
            ids = self.prompts.encode(text)
        tokens = self.prompts.checked(self.prompts.truncated(ids, params), params)
        limit = (
            self.max_model_len
            if params.max_tokens is None
            else min(self.max_model_len, len(tokens) + params.max_tokens)
        )
        request = Request("", 0, tokens, params, limit, resolve_seeds(params, self._seeds), text, pooling=pooling)
        request.images = None if images is None else images.inputs
        request.types = None if types is None else list(types)
        request.switch = self.model.rotary_switch
        request.bad_words = self.prompts.tokenize_bad_words(params)
        request.matcher = self.compile_grammar(params)
        if lora_request is not None:
            if self._adapters is None:
                raise needs_lora(lora_request)
            self._adapters.use(lora_request, request, self._runner)  # type: ignore[arg-type]  # no encoder
        request.sequences.append(self._new_sequence(request, 0))
        return request

    def _check_images(self, params: SamplingParams, pooling: PoolingParams | None) -> None:
        """Raise ValueError if a request with images asks for what it cannot have."""
        if pooling is not None:
            raise ValueError(f"{_NAME}: a prompt that becomes a vector must have no images, got some")
        if params.truncate_prompt_tokens is not None:
            rule = "truncate_prompt_tokens must be None for a prompt with images"
            raise ValueError(f"{_NAME}: {rule}, got {params.truncate_prompt_tokens}")
        self.prompts.images.check()

    def check_generates(self) -> None:
        """Raise ValueError for a model that generates nothing."""
        if self.is_encoder:
            kind = self.model.config.model_type  # type: ignore[attr-defined]  # of EncoderConfig
            raise ValueError(
                f"{_NAME}: model must be a causal language model to generate text, got an encoder ({kind}), which has "
                "embeddings: call embed, or POST /v1/embeddings"
            )

    def lead(self) -> Followers:
        """Send the steps to the other ranks of torchrun from now on: requests come to this rank, 0, alone.

        Returns:
            The other ranks, which must call follow; the caller closes them.
        """
        followers = Followers()
        self._runner = TPRunner(self._runner, followers)  # type: ignore[arg-type]  # a Runner: torchrun's ranks have one
        return followers

    def follow(self) -> None:
        """Compute the steps of rank 0, which leads, until it closes; RuntimeError if it ends without that."""
        follow(self._runner)

    def compile_grammar(self, params: SamplingParams) -> Matcher | None:
        """Compile a request's structured_outputs, which is kept: a caller may do so beforehand, on any thread.

        Returns:
            Its beginning; None: any output.

        Raises:
            ImportError: Without llguidance.
            ValueError: For a form that is invalid, that no text can have or that is too complex; without a tokenizer.
        """
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise ValueError(f"{_NAME}: structured_outputs must be None where there is no tokenizer, got a form")
        with self._grammars_lock:
            if self._grammars is None:
                config = self.model.config
                self._grammars = Grammars(self.tokenizer, config.vocab_size, config.eos_token_ids)
        return self._grammars.compile(params.structured_outputs)

    def load_adapter(self, lora_request: LoRARequest) -> None:
        """Load an adapter before a request asks for it; errors are those of a request with it."""
        if self._adapters is None:
            raise needs_lora(lora_request)
        self._adapters.load(lora_request, self._runner)  # type: ignore[arg-type]  # no encoder

    def submit(self, request: Request, id: str) -> str:
        """Add a Request of new_request under an id that no other request has; return the id."""
        self._repair()
        if request.images is not None:
            request.embedded = self._runner.embed(request.prompt, request.images)  # type: ignore[union-attr]  # no encoder
            request.images, request.keys = None, keys_of(request.prompt, request.embedded)
        self._number += 1
        request.id, request.number, request.arrived = id, self._number, time.perf_counter()
        try:
            self._requests[id] = request
            self.scheduler.add(request.sequences[0])
            return id
        except BaseException:  # interrupted: the caller does not get the id
            self._broken = True
            self._requests.pop(id, None)
            raise

    def score_params(
        self, use_activation: bool | None = None, truncate_prompt_tokens: int | None = None, only: int | None = None
    ) -> ScoreParams:
        """Return the settings of a request for scores; arguments as PoolingDefaults.scores.

        Raises:
            ValueError: For a model that is no classifier, or has another number of labels than `only`.
        """
        labels = self.model.labels if isinstance(self.model, Encoder) else 0
        if not labels or only not in (None, labels):
            rule = "a classifier" if only is None else "a cross-encoder, a classifier with one label"
            came = f"{labels} labels" if labels else "a model without a classifier"
            raise ValueError(f"{SCORE}: model must be {rule} (...ForSequenceClassification), got {came}")
        return self.prompts.pooling.scores(labels, use_activation, truncate_prompt_tokens)

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        ends, seed = self.model.config.eos_token_ids, request.seeds[index]
        matcher = None if request.matcher is None else request.matcher.copy()
        row = Row(request.params, seed, request.prompt, [], ends, request.bad_words, matcher)
        sequence = Sequence(request, index, row, list(request.prompt))
        sequence.identity = sequence.root
        return sequence

    def abort(self, id: str) -> bool:
        """Cancel a request; the next step returns its last output. Return False if it is unknown or finished."""
        self._repair()
        request = self._requests.get(id) if isinstance(id, str) else None
        if request is None or request.is_finished:
            return False
        try:
            self._changed[request] = None
            for sequence in request.sequences:
                if sequence.finish is None:
                    self._finish(sequence, Finish.ABORT)
            return True
        except BaseException:
            self._broken = True
            raise

    def forget_prefixes(self) -> None:
        """Drop the prefix cache; call it after changing the model's parameters."""
        self._repair()
        try:
            self._blocks.forget()
            self.scheduler.forget_states()
        except BaseException:  # interrupted
            self._broken = True
            raise

    def has(self, id: str) -> bool:
        """Return whether a request is unfinished, or its last output was not returned yet."""
        return id in self._requests

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute and no output to return."""
        return not self._requests

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, including scales."""
        return self._cache.bytes_per_token

    def metrics(self) -> Metrics:
        """Return the engine's counts; every call returns the same object."""
        m, s = self._metrics, self.scheduler
        m.waiting, m.running, m.preemptions = len(s.waiting), len(s.running), s.preemptions
        m.free_blocks, m.kept_blocks = self._blocks.free, self._blocks.kept
        return m

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            An output for each request that has new tokens or is finished.
        """
        self._repair()
        start = time.perf_counter()
        if self._returned:
            self.outputs, self._returned = [], False
        try:
            chunks = self._guessed(self.scheduler.schedule())
            if chunks:
                decodes, begin = self._drafts is not None and is_decode(chunks), time.perf_counter()
                self._compute(chunks)
                end = time.perf_counter()
                self._count(chunks, end - start)
                if self._drafts is not None and decodes:
                    self._drafts.note(sum(1 + len(chunk.draft) for chunk in chunks), end - begin)
            self._collect_outputs()
            self._returned = True
            return list(self.outputs)
        except BaseException:  # the next step returns what this one did not
            self._broken, self._returned = True, False
            raise

    def _collect_outputs(self) -> None:
        for request in self._changed:
            output = output_of(request, self.tokenizer)
            if request.last_output is None or output.progress > request.last_output.progress:
                self.outputs.append(output)
                request.last_output = output
            if request.is_finished:
                self._requests.pop(request.id, None)
        self._changed = {}

    def _repair(self) -> None:
        """Rebuild all state from the requests and their tokens, if the last call was interrupted."""
        if not self._broken:
            return
        if not self._returned:
            for output in self.outputs:
                if output.request_id in self._requests:
                    self._requests[output.request_id].last_output = output
        unfinished = []
        for request in sorted(self._requests.values(), key=lambda request: request.number):
            if len(request.sequences) < request.params.n:  # interrupted while the samples were made
                del request.sequences[1:]
            for sequence in request.sequences:
                if sequence.finish is None:
                    sequence.restart()
                    unfinished.append(sequence)
                else:
                    sequence.blocks = []
        self.scheduler.restart(unfinished)
        for sequence in unfinished:
            if sequence.generated:
                self._finish_if_done(sequence)
        for request in self._requests.values():
            if request.is_finished and request.finished is None:
                request.finished = time.perf_counter()
            if request.first_token is None and any(sequence.generated for sequence in request.sequences):
                request.first_token = time.perf_counter()
        self._changed = dict.fromkeys(self._requests.values())
        self._broken = False

    def _compute(self, chunks: list[ScheduledChunk]) -> None:
        """Run the chunks, and sample for the sequences whose tokens are all computed."""
        try:
            self._run(chunks)
        except Exception as error:  # only the requests of this step fail
            message = str(error) if isinstance(error, (RuntimeError, MemoryError)) else described(error)
            self.scheduler.forget_states()  # it may not have come to copy them
            for request in dict.fromkeys(chunk.sequence.request for chunk in chunks):
                self._changed[request] = None
                for sequence in request.sequences:
                    if sequence.finish is None:
                        self._finish(sequence, Finish.ERROR, error=f"{_NAME}: the step failed: {message}")

    def _run(self, chunks: list[ScheduledChunk]) -> None:
        self._start_masks(chunks)
        scheduler = self.scheduler
        logits = self._runner.run([chunk_input(c) for c in chunks], scheduler.copies, scheduler.state_copies)
        for i, prompt_logits in self._runner.prompt_logits.items():
            self._keep_prompt_logprobs(chunks[i], prompt_logits)
        rows: list[int] = []
        sampled_ones: list[tuple[Sequence, tuple[int, ...]]] = []  # and guesses
        wanted = 0
        for i, chunk in enumerate(chunks):
            self.scheduler.computed(chunk)
            if i in self._runner.states:
                self._pool(chunk, self._runner.states[i])
            elif chunk.sequence.remaining == 0:
                count = 1 + len(chunk.draft)
                for sequence in self._samples(chunk.sequence):
                    rows += range(wanted, wanted + count)
                    sampled_ones.append((sequence, chunk.draft))
                wanted += count
        if not sampled_ones:
            return
        if rows != list(range(logits.shape[0])):
            logits = logits[torch.tensor(rows, device=logits.device)]
        settings = [row for sequence, draft in sampled_ones for row in sequence.row.along(draft)]
        sampled = iter(self._sampler(logits, settings))
        now = time.perf_counter()
        for sequence, draft in sampled_ones:
            if sequence.request.first_token is None:
                sequence.request.first_token = now
                self._metrics.reused_tokens += sequence.request.reused
            self._changed[sequence.request] = None
            results = [next(sampled) for _ in range(1 + len(draft))]
            if sequence.finish is None:
                self._append(sequence, results[0])
            if draft:
                self._append_guessed(sequence, draft, results)

    def _append_guessed(self, sequence: Sequence, draft: SequenceOf[int], results: SequenceOf[Sampled]) -> None:
        """Append further tokens as long as the guess of the one before was right; results[0] was appended."""
        right = 0
        for guess, result, following in zip(draft, results, results[1:], strict=False):
            if sequence.finish is not None or result.token != guess:
                break
            right += 1
            self.scheduler.computed(ScheduledChunk(sequence, len(sequence.tokens) - 1, 1))
            self._append(sequence, following)
        self._metrics.draft_tokens += len(draft)
        self._metrics.accepted_tokens += right
        if self._drafts is not None:
            self._drafts.judge(sequence, len(draft), right)

    def _pool(self, chunk: ScheduledChunk, states: Tensor) -> None:
        """Add a chunk's hidden states [tokens, hidden_size] to its request's vector; the last one finishes it."""
        sequence, request = chunk.sequence, chunk.sequence.request
        params = request.pooling
        assert params is not None
        request.pooled = params.add(request.pooled, chunk.start, states)
        if sequence.remaining:
            return
        assert request.pooled is not None
        request.pooled = params.finish(request.pooled, len(request.prompt), self.prompts.pooling.dense)
        self._changed[request] = None
        self._metrics.reused_tokens += request.reused
        size = len(request.pooled)
        if params.dimensions is not None and size < params.dimensions:
            error = f"{_NAME}: dimensions must be at most {size}, the model's hidden size, got {params.dimensions}"
            self._finish(sequence, Finish.ERROR, error=error)
        elif not bool(request.pooled.isfinite().all()):
            what = "scores" if isinstance(params, ScoreParams) else "embedding"
            self._finish(sequence, Finish.ERROR, error=f"{_NAME}: the prompt's {what} must be finite, got another")
        else:
            self._finish(sequence, Finish.STOP)

    def _start_masks(self, chunks: list[ScheduledChunk]) -> None:
        """Start to compute the masks of the sequences that will be sampled, beside the model's step."""
        pending = [
            (row.matcher, row.output)
            for sequence, start, num_tokens, _ in chunks
            if (row := sequence.row).matcher is not None and start + num_tokens == len(sequence.tokens)
        ]
        if pending and self._grammars is not None:
            self._grammars.start(pending)

    def _keep_prompt_logprobs(self, chunk: ScheduledChunk, logits: Tensor) -> None:
        """Store the log-probabilities of the prompt's tokens at start + 1 and on, from logits [tokens, vocab_size]."""
        request, first = chunk.sequence.request, chunk.start + 1
        tokens = request.prompt[first : first + chunk.num_tokens]
        count = request.params.prompt_logprobs or 0
        for position, (token, row) in enumerate(zip(tokens, logits, strict=False), first):
            values = log_softmax(row.float())
            own = values[token]
            rank = 1 + int((values > own).sum())
            request.prompt_logprobs[position] = TokenLogprobs(token, own.item(), rank, most_likely(values, count))

    def _samples(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences to sample: this one, or those of a request whose prompt was just computed.

        As many as can run at once share the prompt's blocks; the others wait, and recompute the uncached part of it.
        """
        request = sequence.request
        if len(request.sequences) == request.params.n:
            return [sequence]
        children = [self._new_sequence(request, index) for index in range(1, request.params.n)]
        forked = children[: self.config.max_num_seqs - 1]
        request.sequences += children
        for child in forked:
            self.scheduler.fork(sequence, child)
        self.scheduler.add_first(children[len(forked) :])
        return [sequence, *forked]

    def _append(self, sequence: Sequence, result: Sampled) -> None:
        """Append a sampled token, and finish the sequence if it was the last."""
        if result.error is not None:
            self._finish(sequence, Finish.ERROR, error=result.error)
            return
        if result.logprob is not None:
            one = TokenLogprobs(result.token, result.logprob, result.rank, result.top_logprobs or [])
            sequence.logprobs.append(one)
        sequence.row.output.append(result.token)
        sequence.tokens.append(result.token)  # last, because Sequence.restart keeps only `tokens`
        self._metrics.generated_tokens += 1
        self._finish_if_done(sequence)

    def _finish_if_done(self, sequence: Sequence) -> None:
        """Decode the last token, and finish the sequence if it meets a stop condition."""
        params, token = sequence.request.params, sequence.tokens[-1]
        enough = sequence.generated >= params.min_tokens
        ends = () if params.ignore_eos else self.model.config.eos_token_ids
        is_end = enough and (token in params.stop_token_ids or token in ends)
        try:
            stopped = self._decode_text(sequence, sequence.generated - 1 if is_end else sequence.generated)
        except Exception as error:
            self._finish(sequence, Finish.ERROR, error=f"{_UNREADABLE}, got {described(error)} at token {token}")
            return
        if is_end:
            self._finish(sequence, Finish.STOP, token if token in params.stop_token_ids else None)
        elif stopped is not None:
            self._finish(sequence, Finish.STOP, stopped)
        elif (matcher := sequence.row.matcher) is not None and matcher.has_ended(sequence.row.output):
            self._finish(sequence, Finish.STOP)
        elif len(sequence.tokens) >= sequence.request.limit:
            self._finish(sequence, Finish.LENGTH)

    def _decode_text(self, sequence: Sequence, num_tokens: int) -> str | None:
        """Decode the output's tokens up to `num_tokens` that are not decoded yet.

        Returns:
            The stop string that was found, or None.
        """
        if self.tokenizer is None or num_tokens == 0 or not sequence.request.params.detokenize:
            return None
        if sequence.stream is None:
            sequence.stream = TextStream(self.tokenizer, sequence.request.params, sequence.request.prompt)
        first = len(sequence.request.prompt)
        for token in sequence.tokens[first + sequence.stream.added : first + num_tokens]:
            if sequence.request.params.stop:
                sequence.starts.append(len(sequence.text) + sequence.stream.held)
            sequence.text += sequence.stream.add(token)
        return sequence.stream.stopped

    def _finish(
        self, sequence: Sequence, finish: Finish, stopped_by: int | str | None = None, error: str | None = None
    ) -> None:
        if sequence.stream is not None and sequence.stream.stopped is None:
            try:
                sequence.text += sequence.stream.finish()
            except Exception as failure:
                if finish not in (Finish.ABORT, Finish.ERROR):
                    finish, stopped_by = Finish.ERROR, None
                    error = f"{_UNREADABLE}, got {described(failure)} at the end of the text"
        sequence.stopped_by, sequence.error = stopped_by, error
        sequence.finish = finish  # from here on _repair treats it as finished
        self.scheduler.remove(sequence)
        if sequence.request.is_finished:
            sequence.request.finished = time.perf_counter()
        self._metrics.requests[finish.value] += 1

    def _count(self, chunks: list[ScheduledChunk], seconds: float) -> None:
        m = self._metrics
        m.steps += 1
        m.seconds += seconds
        m.bytes_read += self._step_bytes
        for sequence, start, num_tokens, _ in chunks:
            m.bytes_read += (start + num_tokens) * self._cache.bytes_per_token
            if start < len(sequence.request.prompt):
                m.prompt_tokens += num_tokens


def needs_lora(lora_request: object) -> ValueError:
    return ValueError(
        f"torch_infini.LLM: enable_lora must be True for a request with an adapter, got lora_request={lora_request!r}"
    )


def chunk_size_of(model: ServedModel) -> int:
    """Return the smallest chunk size at which attention is as fast as with the largest."""
    config = model.config
    if model.bytes_per_sequence:
        return 256  # a step takes one chunk of a sequence
    return 64 if config.num_attention_heads > config.num_key_value_heads else 128


def chunk_input(chunk: ScheduledChunk) -> ChunkInput:
    sequence, start, num_tokens, draft = chunk
    end = start + num_tokens
    request = sequence.request
    embedded = request.embedded if start < len(request.prompt) else None
    # Once tokens were generated they are known; a sequence that became long would compute others.
    all_wanted = (
        request.params.prompt_logprobs is not None
        and sequence.index == sequence.generated == 0
        and start < len(request.prompt) - 1
    )
    adapter = -1 if request.adapter is None else request.adapter.slot
    return ChunkInput(
        [*sequence.tokens[start:end], *draft],
        start,
        sequence.blocks,
        end == len(sequence.tokens),
        all_wanted,
        adapter,
        request.pooling is not None,
        sequence.is_long,
        sequence.state,
        request.types,
        isinstance(request.pooling, ScoreParams),
        bool(draft),
        sequence.shift,
        embedded,
    )
