"""Runner: runs a model on the pieces that the scheduler chose, and gives the logits behind each.

A step in which every piece is one token is recorded once for each number of sequences and then replayed: on the CPU
as a program of kernel calls, on CUDA as a graph. Steps with prompts in them are computed op by op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import runtime
from ..distributed.workers import Workers
from ..models import Llama
from ..nn import Batch, KVCache, Ranks, WeightFormat
from ..testing import emulates_cuda

RECORDED = 64  # numbers of sequences whose steps are kept; the one that was not used for longest goes


class Work(NamedTuple):
    """Tokens of a sequence that are computed: what a step needs to know of it.

    Attributes:
        tokens: The new ones.
        start: Where the first of them is in the sequence.
        blocks: The sequence's blocks, those of the new tokens included.
    """

    tokens: list[int]
    start: int
    blocks: list[int]


def recorder(device: torch.device) -> Callable[[Callable[[], Tensor]], Callable[[], object]] | None:
    """What computes a step and gives what computes it again; None where nothing can be recorded."""
    if device.type == "cpu":
        return None if emulates_cuda() else lambda step: runtime.program(step).replay  # making it computes it
    pool = torch.cuda.graph_pool_handle()  # steps run one at a time: they share what they need between input and logits

    def graph(step: Callable[[], Tensor]) -> Callable[[], object]:
        replay = runtime.graph(lambda _: step(), torch.zeros(1, device=device), pool=pool).replay
        replay()
        return replay

    return graph


class Runner:
    """The model, its cache, and the memory that decode steps read their inputs from.

    Args:
        model: On the device where it runs.
        cache: On the same device.
        max_sequences: In a recorded step, at most; one with more pieces is computed op by op.
        max_tokens: Of a sequence, at most.
        record: Whether decode steps are recorded.
    """

    def __init__(self, model: Llama, cache: KVCache, max_sequences: int, max_tokens: int, record: bool = True) -> None:
        self.model, self.cache = model, cache
        self.device = model.embed.weight.device
        self._recorded = recorder(self.device) if record else None
        width = -(-max_tokens // cache.block_size)
        new = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._inputs = new(4, max_sequences)  # tokens, positions, slots, lengths
        self._tables = new(max_sequences, width)
        self._rows: list[list[int]] = [[] for _ in range(max_sequences)]  # what the tables hold
        self._logits = torch.empty(max_sequences, model.config.vocab_size, dtype=model.dtype, device=self.device)
        self._steps: OrderedDict[int, Callable[[], object]] = OrderedDict()

    @torch.inference_mode()
    def run(self, works: Sequence[Work], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Compute tokens: logits [works, vocab_size] behind the last token of each.

        They lie in memory that the next call overwrites.

        Args:
            works: One for each piece of a sequence; those of one sequence in order.
            copies: (from, to) of blocks that are copied before.
        """
        self.cache.copy_blocks(copies)
        if len(works) <= len(self._rows) and all(len(work.tokens) == 1 for work in works):
            return self._decode(works)
        return self._prefill(works)

    def _prefill(self, works: Sequence[Work]) -> Tensor:
        size = self.cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for new, start, blocks in works:
            end = start + len(new)
            tokens += new
            positions += range(start, end)
            slots += [blocks[at // size] * size + at % size for at in range(start, end)]
            starts.append(len(tokens))
        width = max(len(work.blocks) for work in works)
        tables = [work.blocks + [-1] * (width - len(work.blocks)) for work in works]
        lengths = [work.start + len(work.tokens) for work in works]
        tensors = (torch.tensor(x, device=self.device) for x in (tokens, positions, slots, tables, lengths, starts))
        return self.model(Batch(*tensors), self.cache, last=True)

    def _decode(self, works: Sequence[Work]) -> Tensor:
        n, size = len(works), self.cache.block_size
        columns = []
        for row, ((token,), start, blocks) in enumerate(works):
            if self._rows[row] != blocks:
                self._rows[row] = []  # an interrupt behind the next line must not leave it to name what was there
                self._tables[row, : len(blocks)] = torch.tensor(blocks)
                self._rows[row] = list(blocks)
            columns.append((token, start, blocks[start // size] * size + start % size, start + 1))
        self._inputs[:, :n] = torch.tensor(columns).t()
        if n in self._steps:
            self._steps.move_to_end(n)
            self._steps[n]()
        else:
            self._steps[n] = self._first_step(n)
            if len(self._steps) > RECORDED:
                self._steps.popitem(last=False)
        return self._logits[:n]

    def _first_step(self, n: int) -> Callable[[], object]:
        """Compute a step; what computes the next ones."""
        tokens, positions, slots, lengths = (row[:n] for row in self._inputs.unbind(0))
        batch = Batch(tokens, positions, slots, self._tables[:n], lengths)
        logits = self._logits[:n]

        def step() -> Tensor:
            return self.model(batch, self.cache, out=logits)

        if self._recorded is not None:
            return self._recorded(step)
        step()
        return step


class SharedRunner:
    """A Runner whose model is shared with workers: they are told of every step and compute it too.

    Args:
        runner: This process's.
        workers: Whose objects are Followers, or have their methods.
    """

    def __init__(self, runner: Runner, workers: Workers) -> None:
        self._runner, self._workers = runner, workers

    def run(self, works: Sequence[Work], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """As Runner.run."""
        self._workers.tell("run", works, copies)
        with self._workers.watched():
            return self._runner.run(works, copies)


class Follower:
    """What a worker does for a SharedRunner.

    Args:
        model: The worker's part of the model.
    """

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._runner: Runner | None = None

    def start(
        self, blocks: int, block_size: int, dtype: torch.dtype, max_sequences: int, max_tokens: int, record: bool
    ) -> None:
        """Make a cache and a Runner, as the engine made its own."""
        self._runner = None  # its memory is free before the new one's is taken
        cache = self._model.new_cache(blocks, block_size, dtype)
        self._runner = Runner(self._model, cache, max_sequences, max_tokens, record)

    def run(self, works: Sequence[Work], copies: Sequence[tuple[int, int]]) -> None:
        """Compute a step."""
        assert self._runner is not None
        self._runner.run(works, copies)


def follow(ranks: Ranks, folder: Path, weights: WeightFormat, dtype: torch.dtype | str | None, device: str) -> Follower:
    """A worker's Follower, whose part of the model is read as Llama.from_pretrained reads it."""
    return Follower(Llama.from_pretrained(folder, weights, dtype, device, False, ranks))
