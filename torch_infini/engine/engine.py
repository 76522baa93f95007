"""Engine: many requests on one model, step by step. Each step runs the pieces that the scheduler chose, samples a token
for every sequence whose tokens are all computed, and tells what came of it.

Nothing here waits: LLM calls step() until all is done, AsyncLLM does so on a thread.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..models import Llama
from ..nn.cache import token_bytes
from .blocks import BlockManager
from .outputs import Metrics, RequestOutput, output_of
from .runner import Runner, SharedRunner, Work
from .sampler import Row, Sampled, Sampler, resolve_seeds
from .sampling_params import SamplingParams
from .scheduler import Piece, Scheduler
from .sequence import Finish, Request, Sequence
from .text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME = "torch_infini.Engine"
KVCacheDtype = Literal["int8"]
CACHE_BYTES = 2 << 30  # of keys and values, where the config does not say


@dataclass(frozen=True)
class EngineConfig:
    """How an engine shares a machine among requests.

    Attributes:
        max_sequences: How many are computed at a time.
        max_length: Tokens of a sequence, prompt included; None: the model's positions.
        cache_bytes: For keys and values; None: what max_sequences of max_length take, at most 2 GiB.
        cache_blocks: The same in blocks; at most one of the two.
        block_size: Tokens in a block of the cache.
        kv_cache_dtype: "int8": keys and values are kept as int8 with a float32 scale for each token and head: 0.52 of
            the memory of bfloat16 for heads of 128 columns; docs/engine.md says how fast and how exact that is. None:
            in the model's dtype.
        prompt_tokens: From so many tokens of prompts on a step takes no other piece: while a step takes longer, those
            who generate wait.
        piece: Long prompts are cut at multiples of so many tokens.
        reuse_prefixes: Whether a prompt may begin with blocks that others filled with the same tokens.
        record: Whether decode steps are recorded and replayed (torch_infini.runtime.program, on CUDA graph).
    """

    max_sequences: int = 32
    max_length: int | None = None
    cache_bytes: int | None = None
    cache_blocks: int | None = None
    block_size: int = 32
    kv_cache_dtype: KVCacheDtype | None = None
    prompt_tokens: int = 512
    piece: int = 256
    reuse_prefixes: bool = True
    record: bool = True

    def __post_init__(self) -> None:
        for name in (
            "max_sequences",
            "max_length",
            "cache_bytes",
            "cache_blocks",
            "block_size",
            "prompt_tokens",
            "piece",
        ):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"torch_infini.EngineConfig: {name} must be an integer of at least 1, got {value!r}")
        if self.kv_cache_dtype not in (None, *get_args(KVCacheDtype)):
            raise ValueError(
                f'torch_infini.EngineConfig: kv_cache_dtype must be "int8" or None (the model\'s), got '
                f"{self.kv_cache_dtype!r}"
            )
        if self.cache_bytes is not None and self.cache_blocks is not None:
            raise ValueError(
                "torch_infini.EngineConfig: cache_blocks must be None where cache_bytes is given, got both"
            )


class Engine:
    """Serves requests with one model; for one thread at a time.

    Args:
        model: On the device where it runs.
        tokenizer: Of transformers; None: prompts come as tokens, and there are no texts or stop strings.
        config: How the machine is shared.

    Attributes:
        model, tokenizer, config: As given.
        max_length: Tokens that a sequence may have.

    Raises:
        ValueError: If the cache is too small for a single block, or max_length beyond the model's positions.
    """

    def __init__(
        self, model: Llama, tokenizer: PreTrainedTokenizerBase | None = None, config: EngineConfig | None = None
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        c, positions = self.config, model.config.max_position_embeddings
        if c.max_length is not None and c.max_length > positions:
            raise ValueError(
                f"{_NAME}: max_length must be at most the model's positions, {positions}, got {c.max_length}"
            )
        length = c.max_length or positions
        blocks = self._count_blocks(length)
        self.max_length = min(length, blocks * c.block_size)
        self._cache = model.new_cache(blocks, c.block_size, self._cache_dtype)
        self._blocks = BlockManager(blocks, c.block_size, c.reuse_prefixes)
        self._scheduler = Scheduler(self._blocks, c.max_sequences, c.prompt_tokens, c.piece)
        self._runner: Runner | SharedRunner = Runner(model, self._cache, c.max_sequences, self.max_length, c.record)
        self._seeds: torch.Generator | None = None
        if model.ranks is not None and model.ranks.workers is not None:
            sizes = blocks, c.block_size, self._cache_dtype, c.max_sequences, self.max_length
            model.ranks.workers.tell("start", *sizes, c.record)
            self._runner = SharedRunner(self._runner, model.ranks.workers)
        elif model.ranks is not None:  # who make the same calls and so have to draw the same numbers
            self._seeds = model.ranks.generator()
        self._sampler = Sampler()
        self._step_bytes = model.bytes_per_step
        self._requests: dict[str, Request] = {}
        self._told: dict[Sequence, tuple[int, int]] = {}
        self._ended: list[Request] = []  # by abort: to be told by the next step
        self._metrics = Metrics(blocks=blocks)
        self._number = 0

    @property
    def _cache_dtype(self) -> torch.dtype:
        return torch.int8 if self.config.kv_cache_dtype == "int8" else self.model.dtype

    def _count_blocks(self, length: int) -> int:
        c, size = self.model.config, self.config.block_size
        if self.config.cache_blocks is not None:
            return self.config.cache_blocks
        sizes = c.num_hidden_layers, self.model.kv_heads, c.head_dim
        block_bytes = size * token_bytes(*sizes, self._cache_dtype)
        wanted = self.config.max_sequences * -(-length // size) * block_bytes
        budget = self.config.cache_bytes or min(wanted, CACHE_BYTES)
        if budget < block_bytes:
            raise ValueError(f"{_NAME}: cache_bytes must be at least a block's, {block_bytes}, got {budget}")
        return budget // block_bytes

    def add(self, prompt: str | SequenceOf[int], params: SamplingParams | None = None, id: str | None = None) -> str:
        """Take a request in; the next steps compute it.

        Args:
            prompt: Text, which needs a tokenizer, or token ids.
            params: Its settings; None: SamplingParams().
            id: A name for it; None: one is made.

        Returns:
            The id.

        Raises:
            ValueError: For a prompt or settings of another type, an empty prompt, one that leaves no room for a token,
                ids outside the vocabulary, or an id that is in use. Nothing else is disturbed.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{_NAME}: params must be SamplingParams or None, got {params!r}")
        if not isinstance(prompt, Iterable):
            raise ValueError(f"{_NAME}: prompt must be text or token ids, got {prompt!r}")
        text = prompt if isinstance(prompt, str) else None
        tokens = self._checked(self.encode(prompt) if isinstance(prompt, str) else prompt, params)
        if id is not None and id in self._requests:
            raise ValueError(f"{_NAME}: id must be that of no request that goes on, got {id!r}")
        self._number += 1
        id = str(self._number) if id is None else id
        while id in self._requests:  # someone else gave this one
            id += "'"
        limit = self.max_length if params.max_tokens is None else min(self.max_length, len(tokens) + params.max_tokens)
        request = Request(id, self._number, tokens, params, limit, resolve_seeds(params, self._seeds), text)
        request.sequences.append(self._new_sequence(request, 0))
        self._requests[id] = request
        self._scheduler.add(request.sequences[0])
        return id

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, special tokens as the tokenizer adds them."""
        if self.tokenizer is None:
            raise ValueError(f"{_NAME}: prompt must be token ids, for the model's folder has no tokenizer, got text")
        return list(self.tokenizer(text)["input_ids"])

    def _checked(self, prompt: SequenceOf[int], params: SamplingParams) -> list[int]:
        """The prompt's ids as plain integers, if it and the settings can be served."""
        vocabulary = self.model.config.vocab_size
        tokens: list[int] = []
        for token in prompt:
            try:
                tokens.append(operator.index(token))
            except TypeError:
                tokens.append(-1)
            if not 0 <= tokens[-1] < vocabulary:
                raise ValueError(f"{_NAME}: prompt must be token ids from 0 to {vocabulary - 1}, got {token!r}")
        if not tokens:
            raise ValueError(f"{_NAME}: prompt must have at least one token, got none")
        if len(tokens) >= self.max_length:
            raise ValueError(
                f"{_NAME}: prompt must be shorter than {self.max_length} tokens, the least of max_length and what the "
                f"cache holds, got {len(tokens)}"
            )
        if params.n > self.config.max_sequences:
            raise ValueError(f"{_NAME}: n must be at most max_sequences, {self.config.max_sequences}, got {params.n}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{_NAME}: stop must be empty where there is no tokenizer, got {params.stop}")
        outside = [t for t in (*params.stop_token_ids, *(params.logit_bias or ())) if t >= vocabulary]
        if outside:
            raise ValueError(
                f"{_NAME}: stop_token_ids and logit_bias must name tokens from 0 to {vocabulary - 1}, got {outside[0]}"
            )
        return tokens

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        row = Row(request.params, request.seeds[index], request.prompt, [], self.model.config.eos_token_ids)
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, request.params, request.prompt)
        return Sequence(request, index, row, list(request.prompt), stream)

    def abort(self, id: str) -> bool:
        """Cancel a request; the next step tells its end. False if there is none that goes on."""
        request = self._requests.get(id)
        if request is None or request in self._ended:
            return False
        for sequence in request.sequences:
            if sequence.finish is None:
                self._end(sequence, Finish.ABORT)
        self._ended.append(request)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do and nothing to tell."""
        return not self._requests

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the keys and values of a token take, with their scales."""
        return self._cache.bytes_per_token

    def metrics(self) -> Metrics:
        """What the engine does; the object is the same at every call."""
        m, s = self._metrics, self._scheduler
        m.waiting, m.running, m.preemptions = len(s.waiting), len(s.running), s.preemptions
        m.free_blocks, m.kept_blocks = self._blocks.free, self._blocks.kept
        return m

    def step(self) -> list[RequestOutput]:
        """Compute once, and tell what came of it.

        Returns:
            An output for each request that has new tokens or ended.
        """
        start = time.perf_counter()
        touched = dict.fromkeys(self._ended)
        self._ended = []
        pieces = self._scheduler.schedule()
        if pieces:
            for sequence in self._compute(pieces):
                touched[sequence.request] = None
            self._count(pieces, time.perf_counter() - start)
        outputs = [output_of(request, self._told) for request in touched]
        for request in touched:
            if request.is_finished:
                self._forget(request)
        return outputs

    def _compute(self, pieces: list[Piece]) -> list[Sequence]:
        """Run the pieces and sample; the sequences that have a new token or ended."""
        try:
            logits = self._runner.run([work_of(piece) for piece in pieces], self._scheduler.copies)
        except (RuntimeError, MemoryError) as error:  # whoever is in this step fails, all others go on
            failed = list(dict.fromkeys(piece.sequence for piece in pieces))
            for sequence in failed:
                self._end(sequence, Finish.ERROR, error=f"{_NAME}: the step failed: {error}")
            return failed
        rows: list[int] = []
        sequences: list[Sequence] = []
        for i, piece in enumerate(pieces):
            self._scheduler.computed(piece)
            if piece.sequence.remaining == 0:
                for sequence in self._samples(piece.sequence):
                    rows.append(i)
                    sequences.append(sequence)
        if not sequences:
            return []
        if rows != list(range(logits.shape[0])):
            logits = logits[torch.tensor(rows, device=logits.device)]
        sampled = self._sampler(logits, [sequence.row for sequence in sequences])
        now = time.perf_counter()
        for sequence, result in zip(sequences, sampled, strict=True):
            if sequence.request.first_token is None:
                sequence.request.first_token = now
                self._metrics.reused_tokens += sequence.request.reused
            self._take(sequence, result)
        return sequences

    def _samples(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, and where it is a prompt that n samples follow, those."""
        request = sequence.request
        if len(request.sequences) == request.params.n:
            return [sequence]
        for index in range(1, request.params.n):
            child = self._new_sequence(request, index)
            request.sequences.append(child)
            self._scheduler.fork(sequence, child)
        return list(request.sequences)

    def _take(self, sequence: Sequence, result: Sampled) -> None:
        """Append a sampled token and see whether it is the last."""
        if result.error is not None:
            self._end(sequence, Finish.ERROR, error=result.error)
            return
        params, token = sequence.request.params, result.token
        sequence.tokens.append(token)
        sequence.row.output.append(token)  # type: ignore[attr-defined]
        self._metrics.generated_tokens += 1
        if result.logprob is not None:
            sequence.logprobs.append((result.logprob, result.top_logprobs or []))
        enough = sequence.generated >= params.min_tokens
        ends = () if params.ignore_eos else self.model.config.eos_token_ids
        if enough and (token in params.stop_token_ids or token in ends):
            self._end(sequence, Finish.STOP, token)
            return
        if sequence.stream is not None:
            sequence.text += sequence.stream.add(token)
            if sequence.stream.stopped is not None:
                self._end(sequence, Finish.STOP, sequence.stream.stopped)
                return
        if len(sequence.tokens) >= sequence.request.limit:
            self._end(sequence, Finish.LENGTH)

    def _end(
        self, sequence: Sequence, finish: Finish, stopped_by: int | str | None = None, error: str | None = None
    ) -> None:
        sequence.finish, sequence.stopped_by, sequence.error = finish, stopped_by, error
        if sequence.stream is not None and sequence.stream.stopped is None:
            sequence.text += sequence.stream.finish()
        self._scheduler.remove(sequence)
        if sequence.request.is_finished:
            sequence.request.finished = time.perf_counter()
        self._metrics.requests[finish.value] += 1

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        for sequence in request.sequences:
            self._told.pop(sequence, None)

    def _count(self, pieces: list[Piece], seconds: float) -> None:
        m = self._metrics
        m.steps += 1
        m.seconds += seconds
        m.bytes_read += self._step_bytes
        for sequence, start, count in pieces:
            m.bytes_read += (start + count) * self._cache.bytes_per_token
            if start < len(sequence.request.prompt):
                m.prompt_tokens += count


def work_of(piece: Piece) -> Work:
    sequence, start, count = piece
    return Work(sequence.tokens[start : start + count], start, sequence.blocks)
