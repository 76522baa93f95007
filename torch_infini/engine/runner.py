"""Runner: computes the chunks that the scheduler chose and returns the logits of each one's last token.

A step in which every chunk is one token is a recorded decode step; others are computed op by op. TPRunner and Worker
run a model whose tensor-parallel group has worker processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import Followers, TPGroup, Workers
from ..nn import Adapters, Batch, EmbeddedPrompt, EmbeddedRows, KVCache, LoRAFactors, MixedKVCache
from .decode import DecodeSteps
from .model import ReadsImages, ServedModel


class ChunkInput(NamedTuple):
    """The model's input for a chunk: plain data that can be sent to workers.

    Attributes:
        tokens: The chunk's tokens.
        start: The index of the first one in the sequence.
        blocks: The sequence's blocks, including those of the chunk.
        wanted: Whether the logits of its last token are needed.
        all_wanted: Whether the logits of all its tokens are needed, for prompt_logprobs.
        adapter: The slot of the sequence's adapter; negative: none.
        pooled: Whether its hidden states are needed, and no logits.
        is_long: Whether the sequence is long from its first token on, for the model's RotarySwitch.
        state: The sequence's row among the model's states; negative: the model keeps none.
        types: The token_type_ids of its tokens; None: zeros. Of encoders alone.
        scored: Whether a classifier's logits are needed, and no hidden states.
        drafted: Whether its tokens are the newest one and guesses of the next, of which all logits are needed.
        shift: What is added to the places of its tokens, behind a prompt with images.
        embedded: The prompt with images that its tokens are of; None: they are of none.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    wanted: bool = True
    all_wanted: bool = False
    adapter: int = -1
    pooled: bool = False
    is_long: bool = False
    state: int = -1
    types: list[int] | None = None
    scored: bool = False
    drafted: bool = False
    shift: int = 0
    embedded: EmbeddedPrompt | None = None


class Runner:
    """A model and its cache.

    Args:
        model: On the device where it runs.
        cache: On the same device.
        max_num_seqs: The most rows of a recorded step; larger steps are computed op by op.
        max_tokens: The most tokens of a sequence.
        record: Whether decode steps are recorded.
        adapters: Of the model; None: it has none.

    Attributes:
        prompt_logits: Logits [tokens of the chunk, vocab_size] of the last run, by index of the chunks with all_wanted.
        states: Hidden states [tokens of the chunk, hidden_size] of the last run, by index of the chunks with pooled.
        before_compute: Called in each run when the inputs are made, before the model computes. It must not raise.
    """

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache | MixedKVCache,
        max_num_seqs: int,
        max_tokens: int,
        record: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        self.model, self.cache, self._adapters = model, cache, adapters
        self.device = model.device
        self._width = -(-max_tokens // cache.block_size)  # of block tables
        self._steps = DecodeSteps(model, cache, max_num_seqs, self._width, record, adapters)
        self.prompt_logits: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        self.before_compute: Callable[[], object] = do_nothing
        self._table_rows: list[list[int]] = [[] for _ in range(max_num_seqs)]  # contents of the steps' block tables

    @torch.inference_mode()
    def run(
        self,
        chunks: Sequence[ChunkInput],
        copies: Sequence[tuple[int, int]] = (),
        state_copies: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Compute chunks.

        Args:
            chunks: Chunks of the same sequence must be in order; where the model keeps states, there is one of each.
            copies: (from, to) of blocks to copy first.
            state_copies: Likewise of rows of states.

        Returns:
            Logits [n, vocab_size] of the last token of each wanted chunk, or of all tokens of chunks with guesses, in
            memory that the next call overwrites; unspecified if none is wanted.
        """
        self.cache.copy_blocks(copies)
        if (states := self.cache.states) is not None:
            states.copy(state_copies)
            states.reset([chunk.state for chunk in chunks if chunk.start == 0])
        self.prompt_logits, self.states = {}, {}
        if not any(chunk.pooled for chunk in chunks):
            return self._logits(chunks)
        # In a batch of their own: the bits of the others' logits do not depend on them.
        pooled = [i for i, chunk in enumerate(chunks) if chunk.pooled]
        rows = self._prefill([chunks[i] for i in pooled], self.model.hidden_states)
        self.states = dict(zip(pooled, rows.split([len(chunks[i].tokens) for i in pooled]), strict=True))
        others = [i for i, chunk in enumerate(chunks) if not chunk.pooled]
        if not others:
            return torch.empty(0, self.model.config.vocab_size, dtype=self.model.dtype, device=self.device)
        logits = self._logits([chunks[i] for i in others])
        self.prompt_logits = {others[i]: found for i, found in self.prompt_logits.items()}
        return logits

    def set_adapter(self, slot: int, layers: Mapping[str, LoRAFactors]) -> None:
        """Put an adapter into a slot between two calls of run; arguments as of Adapters.set."""
        assert self._adapters is not None
        self._adapters.set(slot, layers)

    def embed(self, tokens: Sequence[int], images: Mapping[str, Tensor]) -> EmbeddedPrompt:
        """Encode the images of a prompt; arguments and errors as of ReadsImages.embed."""
        assert isinstance(self.model, ReadsImages)
        return self.model.embed(tokens, images)

    def join_embedding(self, tokens: Sequence[int], images: Mapping[str, Tensor]) -> None:
        """Take part in embed of rank 0, which sends the rows with the chunks and reports what is wrong with images."""
        with suppress(ValueError):
            self.embed(tokens, images)

    def _logits(self, chunks: Sequence[ChunkInput]) -> Tensor:
        if any(chunk.all_wanted for chunk in chunks):
            return self._prefill_all(chunks)
        if any(chunk.drafted for chunk in chunks):
            return self._decode([row for chunk in chunks for row in rows_of(chunk)])
        if len(chunks) <= len(self._table_rows) and all(
            len(chunk.tokens) == 1 and chunk.embedded is None for chunk in chunks
        ):
            return self._decode(chunks)
        return self._prefill(chunks, partial(self.model, last=True))

    def _prefill_all(self, chunks: Sequence[ChunkInput]) -> Tensor:
        """Compute the logits of all tokens, and store those of the chunks with all_wanted in prompt_logits."""
        logits = self._prefill(chunks, self.model)
        rows, at = [], 0
        for i, chunk in enumerate(chunks):
            if chunk.all_wanted:
                self.prompt_logits[i] = logits[at : at + len(chunk.tokens)]
            at += len(chunk.tokens)
            rows.append(at - 1)
        return logits[torch.tensor([rows[i] for i in wanted_of(chunks)], device=self.device)]

    def _prefill(self, chunks: Sequence[ChunkInput], compute: Callable[[Batch, Any], Tensor]) -> Tensor:
        size = self.cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        of_tokens: list[int] = []
        embedded: list[EmbeddedRows] = []
        switch = self.model.rotary_switch
        for chunk in chunks:
            new, start, blocks, is_long = chunk.tokens, chunk.start, chunk.blocks, chunk.is_long
            if chunk.embedded is not None:
                own = EmbeddedRows(len(tokens), start - chunk.embedded.first, len(new), chunk.embedded)
                embedded.append(own)
            of_tokens += [chunk.adapter] * len(new)
            end = start + len(new)
            tokens += new
            where = range(start + chunk.shift, end + chunk.shift)
            positions += where if switch is None or not is_long else [switch.row(at, True) for at in where]
            slots += [blocks[at // size] * size + at % size for at in range(start, end)]
            starts.append(len(tokens))
        width = max(len(chunk.blocks) for chunk in chunks)
        tables = [chunk.blocks + [-1] * (width - len(chunk.blocks)) for chunk in chunks]
        lengths = [chunk.start + len(chunk.tokens) for chunk in chunks]
        numbers = [tokens, positions, slots, tables, lengths, starts]
        wanted = wanted_of(chunks)
        if len(wanted) < len(chunks):
            numbers.append(wanted)
        fields: list[Any] = [torch.tensor(x, device=self.device) for x in numbers]
        batch = Batch(*fields)
        if embedded:
            batch = replace(batch, embedded=tuple(embedded))
        if self.cache.states is not None:
            batch = replace(batch, states=torch.tensor([chunk.state for chunk in chunks], device=self.device))
        self.before_compute()
        if self._adapters is None or max(of_tokens) < 0:
            return compute(batch, self.cache)
        batch = replace(batch, adapters=torch.tensor(of_tokens, device=self.device))
        with self._adapters.of_batch(batch):
            return compute(batch, self.cache)

    def _decode(self, chunks: Sequence[ChunkInput]) -> Tensor:
        of_rows = [chunk.adapter for chunk in chunks]
        step, size = self._steps.step(len(chunks), self._width, max(of_rows) >= 0), self.cache.block_size
        if step.rows is not None:
            step.rows.copy_(torch.tensor(of_rows))
        if step.states is not None:
            step.states.copy_(torch.tensor([chunk.state for chunk in chunks]))
        columns, switch = [], self.model.rotary_switch
        for row, chunk in enumerate(chunks):
            (token,), start, blocks = chunk.tokens, chunk.start, chunk.blocks
            if self._table_rows[row] != blocks:
                self._table_rows[row] = []  # if the next line is interrupted, the row's content is unknown
                step.tables[row, : len(blocks)] = torch.tensor(blocks)
                self._table_rows[row] = list(blocks)
            position = start + chunk.shift if switch is None else switch.row(start, chunk.is_long)
            columns.append((token, position, blocks[start // size] * size + start % size, start + 1))
        step.inputs.copy_(torch.tensor(columns).t())
        self.before_compute()
        logits = step.run()
        wanted = wanted_of(chunks)
        return logits if len(wanted) == len(chunks) else logits[torch.tensor(wanted, device=self.device)]


def do_nothing() -> None:
    """Do nothing, before a model computes."""


def rows_of(chunk: ChunkInput) -> list[ChunkInput]:
    """Return a chunk for each token of one with guesses: rows of a decode step, each of which sees those before it."""
    return [
        chunk._replace(tokens=[token], start=start, drafted=False)
        for start, token in enumerate(chunk.tokens, chunk.start)
    ]


def wanted_of(chunks: Sequence[ChunkInput]) -> list[int]:
    """Return the indices of the wanted chunks; the last one's if none is wanted, because a step needs a row."""
    return [i for i, chunk in enumerate(chunks) if chunk.wanted] or [len(chunks) - 1]


def with_own_rows(chunk: ChunkInput) -> ChunkInput:
    """Return a chunk to send: of a prompt with images it has the rows of its own tokens."""
    if chunk.embedded is None:
        return chunk
    return chunk._replace(embedded=chunk.embedded.part(chunk.start, chunk.start + len(chunk.tokens)))


class TPRunner:
    """A Runner that also sends every step and adapter to the workers, each of which holds a shard of the model.

    All ranks get steps and adapters in the same order: whether a step is recorded, and with what, is the same on each.

    Args:
        runner: This process's Runner.
        workers: Each holds a Worker (below), or an object with its methods: a Runner, where they are Followers.
    """

    def __init__(self, runner: Runner, workers: Workers | Followers) -> None:
        self._runner, self._workers = runner, workers
        self._lock = threading.Lock()  # adapters come from the threads of callers

    @property
    def before_compute(self) -> Callable[[], object]:
        """As Runner's, of this process alone."""
        return self._runner.before_compute

    @before_compute.setter
    def before_compute(self, call: Callable[[], object]) -> None:
        self._runner.before_compute = call

    @property
    def prompt_logits(self) -> dict[int, Tensor]:
        """As Runner's."""
        return self._runner.prompt_logits

    @property
    def states(self) -> dict[int, Tensor]:
        """As Runner's."""
        return self._runner.states

    def run(
        self,
        chunks: Sequence[ChunkInput],
        copies: Sequence[tuple[int, int]] = (),
        state_copies: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Compute chunks on all ranks; as Runner.run."""
        with self._lock:
            self._workers.send("run", [with_own_rows(chunk) for chunk in chunks], copies, state_copies)
            with self._workers.relay_errors():
                return self._runner.run(chunks, copies, state_copies)

    def embed(self, tokens: Sequence[int], images: Mapping[str, Tensor]) -> EmbeddedPrompt:
        """Encode the images of a prompt, on all ranks where these share what encodes them; as Runner.embed."""
        model = self._runner.model
        if not isinstance(model, ReadsImages) or not model.embeds_on_all_ranks:
            return self._runner.embed(tokens, images)
        with self._lock:
            self._workers.send("join_embedding", list(tokens), {name: value.clone() for name, value in images.items()})
            with self._workers.relay_errors():
                return self._runner.embed(tokens, images)

    def set_adapter(self, slot: int, layers: Mapping[str, LoRAFactors]) -> None:
        """Put an adapter into a slot on all ranks; each takes its part. As Runner.set_adapter."""
        dtype = self._runner.model.dtype
        # Copies, because a view would be sent with all of its file.
        copies = {name: tuple(factor.to(dtype, copy=True) for factor in factors) for name, factors in layers.items()}
        with self._lock:
            self._workers.send("set_adapter", slot, copies)
            self._runner.set_adapter(slot, layers)


class Worker:
    """The object that a worker process holds: it computes the steps that a TPRunner sends.

    Args:
        model: This rank's shard.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._runner: Runner | None = None

    def start(
        self,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        states: int,
        max_rows: int,
        max_tokens: int,
        record: bool,
        adapters: tuple[int, int] | None = None,
    ) -> None:
        """Make a cache and a Runner of the same sizes as the engine's.

        Args:
            blocks, block_size, dtype, states: Of the cache; `states` are those of sequences and of prefixes.
            max_rows, max_tokens, record: Of the Runner.
            adapters: Their slots and rank.
        """
        self._runner = None  # frees its memory before the new one's is allocated
        model = self._model
        cache = model.new_cache(blocks, block_size, dtype, states)
        made = None if adapters is None else Adapters(model.lora_sites(), *adapters, model.dtype, model.device)
        self._runner = Runner(model, cache, max_rows, max_tokens, record, made)

    def run(
        self,
        chunks: Sequence[ChunkInput],
        copies: Sequence[tuple[int, int]],
        state_copies: Sequence[tuple[int, int]],
    ) -> None:
        assert self._runner is not None
        self._runner.run(chunks, copies, state_copies)

    def join_embedding(self, tokens: Sequence[int], images: Mapping[str, Tensor]) -> None:
        assert self._runner is not None
        self._runner.join_embedding(tokens, images)

    def set_adapter(self, slot: int, layers: Mapping[str, LoRAFactors]) -> None:
        assert self._runner is not None
        self._runner.set_adapter(slot, layers)


def make_worker(tp_group: TPGroup, load: Callable[..., ServedModel], *options: Any) -> Worker:
    """Make a Worker whose shard is loaded by load(*options, False, tp_group), as loading.py's load_model."""
    return Worker(load(*options, False, tp_group))
