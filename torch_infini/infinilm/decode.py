"""Steps: passes in which every row has one new token, recorded once for each number of rows and then replayed.

On the CPU they are programs of kernel calls, on CUDA graphs. A pass with more tokens is computed op by op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from .. import runtime
from ..models import Llama
from ..nn import Batch, KVCache
from ..testing import emulates_cuda

RECORDED = 16  # steps that are kept; the one that was not used for longest goes


class Steps:
    """The recorded steps of a model with one cache.

    Args:
        model: On the device where it runs.
        cache: On the same device.
    """

    def __init__(self, model: Llama, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._steps: OrderedDict[tuple[int, int], tuple[Tensor, Tensor, Callable[[], Tensor]]] = OrderedDict()

    def __call__(self, batch: Batch) -> Tensor:
        """Compute a batch of one token a row.

        Args:
            batch: On the CPU.

        Returns:
            Logits [rows, vocabulary], in memory that the next call overwrites.
        """
        rows, width = batch.block_tables.shape
        key = rows, 1 << max(width - 1, 0).bit_length()  # tables grow: not each width has a step of its own
        if key in self._steps:
            self._steps.move_to_end(key)
            inputs, tables, run = self._steps[key]
            self._fill(inputs, tables, batch)
            return run()
        inputs, tables, run, logits = self._first_step(*key, batch)
        self._steps[key] = inputs, tables, run
        if len(self._steps) > RECORDED:
            self._steps.popitem(last=False)
        return logits

    @staticmethod
    def _fill(inputs: Tensor, tables: Tensor, batch: Batch) -> None:
        inputs.copy_(torch.stack((batch.tokens, batch.positions, batch.slot_mapping, batch.seq_lens)))
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables

    def _first_step(self, rows: int, width: int, batch: Batch) -> tuple[Tensor, Tensor, Callable[[], Tensor], Tensor]:
        """Compute a step: the inputs and tables that the next ones read, what computes these, and the logits."""
        model, cache = self._model, self._cache
        device = model.embed.weight.device
        inputs = torch.zeros(4, rows, dtype=torch.int64, device=device)
        tables = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._fill(inputs, tables, batch)

        def step(inputs: Tensor, tables: Tensor) -> Tensor:
            tokens, positions, slots, lengths = inputs.unbind(0)
            return model(Batch(tokens, positions, slots, tables, lengths), cache)

        if device.type == "cuda":
            graph = runtime.graph(step, inputs, tables)
            return *graph.inputs, graph.replay, graph.replay()
        here = lambda: step(inputs, tables)
        if emulates_cuda():
            return inputs, tables, here, here()
        program = runtime.program(here)
        return inputs, tables, program.replay, program.outputs
