"""Runner: runs a model on the pieces that the scheduler chose, and gives the logits behind each.

A step in which every sequence has one token is recorded once for each number of sequences and then replayed: on the CPU
as a program of kernel calls, on CUDA as a graph. Steps with prompts in them are computed op by op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import runtime
from ..models import Llama
from ..nn import Batch, KVCache
from ..testing import emulates_cuda
from .scheduler import Piece

RECORDED = 64  # numbers of sequences whose steps are kept; the one that was not used for longest goes


class Runner:
    """The model, its cache, and the memory that decode steps read their inputs from.

    Args:
        model: On the device where it runs.
        cache: On the same device.
        max_sequences: In one step, at most.
        max_tokens: Of a sequence, at most.
        record: Whether decode steps are recorded.
    """

    def __init__(self, model: Llama, cache: KVCache, max_sequences: int, max_tokens: int, record: bool = True) -> None:
        self.model, self.cache = model, cache
        self.device = model.embed.weight.device
        self._record = record and not (self.device.type == "cpu" and emulates_cuda())
        width = -(-max_tokens // cache.block_size)
        new = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._inputs = new(4, max_sequences)  # tokens, positions, slots, lengths
        self._tables = new(max_sequences, width)
        self._rows: list[list[int]] = [[] for _ in range(max_sequences)]  # what the tables hold
        self._logits = torch.empty(max_sequences, model.config.vocab_size, dtype=model.dtype, device=self.device)
        self._steps: OrderedDict[int, Callable[[], object]] = OrderedDict()

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute the pieces' tokens: logits [pieces, vocab_size] behind the last token of each.

        They lie in memory that the next call overwrites.
        """
        if all(piece.count == 1 for piece in pieces):
            return self._decode(pieces)
        return self._prefill(pieces)

    def _prefill(self, pieces: Sequence[Piece]) -> Tensor:
        size = self.cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, start, count in pieces:
            tokens += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            blocks = sequence.blocks
            slots += [blocks[at // size] * size + at % size for at in range(start, start + count)]
            starts.append(len(tokens))
        width = max(len(piece.sequence.blocks) for piece in pieces)
        tables = [piece.sequence.blocks + [-1] * (width - len(piece.sequence.blocks)) for piece in pieces]
        lengths = [start + count for _, start, count in pieces]
        tensors = (torch.tensor(x, device=self.device) for x in (tokens, positions, slots, tables, lengths, starts))
        last = torch.tensor(starts[1:], device=self.device) - 1
        return self.model(Batch(*tensors), self.cache, last)

    def _decode(self, pieces: Sequence[Piece]) -> Tensor:
        n, size = len(pieces), self.cache.block_size
        columns = []
        for row, (sequence, start, _) in enumerate(pieces):
            blocks = sequence.blocks
            if self._rows[row] != blocks:
                self._tables[row, : len(blocks)] = torch.tensor(blocks)
                self._rows[row] = list(blocks)
            columns.append((sequence.tokens[start], start, blocks[start // size] * size + start % size, start + 1))
        self._inputs[:, :n] = torch.tensor(columns).t()
        step = self._steps.get(n)
        if step is None:
            step = self._steps[n] = self._new_step(n)
            if len(self._steps) > RECORDED:
                self._steps.popitem(last=False)
        self._steps.move_to_end(n)
        step()
        return self._logits[:n]

    def _new_step(self, n: int) -> Callable[[], object]:
        tokens, positions, slots, lengths = (row[:n] for row in self._inputs.unbind(0))
        batch = Batch(tokens, positions, slots, self._tables[:n], lengths)
        logits = self._logits[:n]

        def step() -> Tensor:
            return self.model(batch, self.cache, out=logits)

        if not self._record:
            return step
        if self.device.type == "cpu":
            return runtime.program(step).replay
        return runtime.graph(lambda _: step(), torch.zeros(1, device=self.device)).replay
