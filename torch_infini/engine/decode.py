"""DecodeSteps: forward passes with one new token per sequence, recorded once per batch size and then replayed.

On the CPU a recorded step is a program of kernel calls, on CUDA a graph. The engine and infinilm both decode with it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from .. import runtime
from .._core.devices import backing_type
from .._core.library import emulates_cuda
from ..nn import Adapters, Batch, KVCache, MixedKVCache
from ..ops import chosen_providers
from .model import ServedModel

_logger = logging.getLogger("torch_infini")

MAX_STEPS = 64  # recorded steps that are kept; the least recently used one is dropped first

Record = Callable[[Callable[[], Tensor]], Callable[[], object]]


class DecodeStep:
    """A forward pass of a fixed batch size that reads and writes fixed memory.

    Attributes:
        inputs: [4, rows] int64: token, position, slot and number of keys of each row. To be filled before run().
        rows: [rows] int64, the slot of each row's adapter; None: no row has one. To be filled before run().
        states: [rows] int64, the row of each one's state; None: the model keeps none. To be filled before run().
        tables: [rows, blocks] int64, the block table of each row. To be filled before run().
        logits: [rows, vocab_size], the result.
    """

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache | MixedKVCache,
        inputs: Tensor,
        tables: Tensor,
        logits: Tensor,
        record: Record | None,
        adapters: Adapters | None = None,
        rows: Tensor | None = None,
        states: Tensor | None = None,
    ) -> None:
        self.inputs, self.tables, self.logits, self.rows, self.states = inputs, tables, logits, rows, states
        tokens, positions, slots, lengths = inputs.unbind(0)
        batch = Batch(tokens, positions, slots, tables, lengths, adapters=rows, states=states)

        def forward() -> Tensor:
            with nullcontext() if adapters is None else adapters.of_batch(batch):
                return model(batch, cache, out=logits)

        self._forward = forward
        self._record = record
        self._replay: Callable[[], object] | None = None

    def run(self) -> Tensor:
        """Compute the logits; the first run records. The next run of any step of the model overwrites their memory."""
        if self._replay is not None:
            self._replay()
        elif self._record is not None:
            self._replay = self._record(self._forward)
        else:
            self._forward()
        return self.logits


class DecodeSteps:
    """The decode steps of a model with one cache. All share memory for inputs and logits, which grows on demand.

    Args:
        model: On the device where it runs.
        cache: On the same device.
        max_rows: The largest expected batch size.
        max_blocks: The largest expected number of blocks of a sequence.
        record: Whether steps are recorded; otherwise every step is computed op by op.
        adapters: The adapters that rows may have; None: no row has one.
    """

    def __init__(
        self,
        model: ServedModel,
        cache: KVCache | MixedKVCache,
        max_rows: int = 0,
        max_blocks: int = 0,
        record: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        self._model, self._cache, self._adapters = model, cache, adapters
        self._version = 0  # of the adapters when the steps were recorded
        self._record = recorder(model) if record and model.is_recordable else None
        self._steps: OrderedDict[tuple[int, int, bool], DecodeStep] = OrderedDict()
        self._allocate(max_rows, max_blocks)

    def _allocate(self, rows: int, blocks: int) -> None:
        model = self._model
        device = model.device
        self._inputs = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int64, device=device)
        self._states = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._logits = torch.empty(rows, model.config.vocab_size, dtype=model.dtype, device=device)

    def step(self, rows: int, blocks: int, adapted: bool = False) -> DecodeStep:
        """Return the step for `rows` sequences with block tables of `blocks` columns, with adapters if `adapted`."""
        if adapted and self._adapters is not None and self._adapters.version != self._version:
            self._version = self._adapters.version
            for old in [key for key in self._steps if key[2]]:
                del self._steps[old]
        key = rows, blocks, adapted
        found = self._steps.get(key)
        if found is not None:
            self._steps.move_to_end(key)
            return found
        most, widest = self._tables.shape
        if rows > most or blocks > widest:  # recorded steps keep the memory that they were recorded with
            self._allocate(max(most, power_of_two(rows)), max(widest, power_of_two(blocks)))
        memory = self._inputs[:, :rows], self._tables[:rows, :blocks], self._logits[:rows]
        found = self._steps[key] = DecodeStep(
            self._model,
            self._cache,
            *memory,
            self._record,
            adapters=self._adapters if adapted else None,
            rows=self._rows[:rows] if adapted else None,
            states=None if self._cache.states is None else self._states[:rows],
        )
        while len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)
        return found


def power_of_two(size: int) -> int:
    """Return the least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def recorder(model: ServedModel) -> Record | None:
    """Return a function that computes a step and returns its replay; None if steps cannot be recorded."""
    device = model.device
    if backing_type(device) == "cpu" and not model.kernels_only:
        return partial(_record_ops, model) if device.type == "cpu" else None
    if backing_type(device) == "cpu":
        # A program cannot call a provider's Python. Making a program also computes the step.
        recordable = not emulates_cuda() and not chosen_providers("cpu")
        return (lambda step: runtime.program(step).replay) if recordable else None
    pool = torch.cuda.graph_pool_handle()  # steps run one at a time, so they can share memory for intermediate results

    def graph(step: Callable[[], Tensor]) -> Callable[[], object]:
        replay = runtime.graph(lambda _: step(), torch.zeros(1, device=device), pool=pool).replay
        replay()
        return replay

    return graph


def _record_ops(model: ServedModel, step: Callable[[], Tensor]) -> Callable[[], object]:
    """Record a step of any torch ops; if that fails, this and all later steps are computed op by op."""
    replay: Callable[[], object] = step
    # This logger prints a traceback for each op without a fake.
    fakes = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, fakes.disabled = fakes.disabled, True
    try:
        if model.is_recordable:
            with torch.inference_mode(False), torch.no_grad():
                replay = runtime.record(step).run
    except RuntimeError as error:
        model.is_recordable = False
        _logger.info("torch_infini.Engine: decode steps are not recorded: %s", error)
    finally:
        fakes.disabled = disabled
    replay()
    return replay
