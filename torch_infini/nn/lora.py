"""LoRA adapters of the requests of a batch: each token's row of a linear layer's result gets its own adapter's part.

The op is infini::add_lora, called by a hook after the layer's product. A rank of a sharded model holds the rows of the
second matrix, or the columns of the first one, that belong to its part of the layer; sums are the layer's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn

from .batch import Batch

LoRAFactors = tuple[Tensor, Tensor]  # [r, k] and [n, r], the scale included


class LoRASite(NamedTuple):
    """A projection that adapters may change; of a sharded model this rank's part of it.

    Attributes:
        module: The linear layer that computes it.
        first: Its first column in the layer's result; a layer may compute several projections of one input.
        rows: The parts of the projection's n outputs, rows of its weight, that are here, in the order of the results.
        columns: The part of its k inputs that is here. If not all are, the layer's result is a partial sum, and so is
            what an adapter adds to it.
        shape: (n, k) of the whole projection.
    """

    module: nn.Module
    first: int
    rows: tuple[slice, ...]
    columns: slice
    shape: tuple[int, int]

    @property
    def here(self) -> tuple[int, int]:
        """(n, k) of this rank's part."""
        return sum(rows.stop - rows.start for rows in self.rows), self.columns.stop - self.columns.start

    def part_of(self, factors: LoRAFactors) -> LoRAFactors:
        """Return this rank's part of an adapter's matrices for the whole projection."""
        a, b = factors
        parts = [b[rows] for rows in self.rows]
        return a[:, self.columns], parts[0] if len(parts) == 1 else torch.cat(parts)


class Adapters:
    """The adapters that batches may use, in numbered slots. All matrices of a projection are one tensor.

    Args:
        sites: The projections, by the names that adapters have for them.
        slots: How many adapters there may be at a time.
        rank: The largest rank; adapters of a smaller one are padded by zeros.
        dtype: Of the activations, and of the matrices.
        device: Of the model.

    Attributes:
        version: Rises when a projection gets an adapter for the first time: steps recorded before lack its op.
    """

    def __init__(
        self, sites: Mapping[str, LoRASite], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sites, self.slots, self.rank, self.dtype, self.device = dict(sites), slots, rank, dtype, device
        self.version = 0
        self._lock = RLock()  # adapters are loaded between the calls of a model
        self._rows: Tensor | None = None  # the slot of each token of the current batch
        self._end_rows: Tensor | None = None  # and of the tokens whose results are wanted
        self._layers: dict[str, LoRAFactors] = {}  # [slots, r, k] and [slots, r, n] of the projections in use
        self._of_module: dict[nn.Module, list[tuple[LoRASite, LoRAFactors]]] = {}

    def set(self, slot: int, layers: Mapping[str, LoRAFactors]) -> None:
        """Put an adapter into a slot that no request uses.

        Args:
            slot: From 0 to slots - 1.
            layers: The matrices of whole projections by their names, each [r, k] and [n, r] with r up to `rank`.
        """
        with self._lock:
            new = [name for name in layers if name not in self._layers]
            for name in new:
                self._add_layer(name)
            for name, (a, b) in self._layers.items():
                a[slot].zero_()
                b[slot].zero_()
                if name in layers:
                    of_a, of_b = self.sites[name].part_of(layers[name])
                    a[slot, : of_a.shape[0]].copy_(of_a)
                    b[slot, : of_b.shape[1]].copy_(of_b.t())
            self.version += bool(new)

    def _add_layer(self, name: str) -> None:
        site = self.sites[name]
        n, k = site.here

        def zeros(columns: int) -> Tensor:
            return torch.zeros(self.slots, self.rank, columns, dtype=self.dtype, device=self.device)

        self._layers[name] = zeros(k), zeros(n)
        if site.module not in self._of_module:
            self._of_module[site.module] = []
            # The model outlives this object: its hook must neither keep it nor outlive it.
            add = WeakMethod(self._add)
            # First, before a hook that sums the results of ranks.
            hook = site.module.register_forward_hook(lambda *call: add_to(add(), *call), prepend=True)
            finalize(self, hook.remove)
        self._of_module[site.module].append((site, self._layers[name]))

    def _add(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        """Add the adapters' parts to y [..., n] of a module's call, in place."""
        rows = self._rows
        if rows is None:
            return
        x = args[0].reshape(-1, args[0].shape[-1])
        by_row = y.view(-1, y.shape[-1])
        if x.shape[0] != rows.shape[0]:  # the last layer of a call for wanted tokens alone
            assert self._end_rows is not None
            rows = self._end_rows
        for site, (a, b) in self._of_module[module]:
            torch.ops.infini.add_lora.default(by_row[:, site.first : site.first + site.here[0]], x, a, b, rows)

    @contextmanager
    def of_batch(self, batch: Batch) -> Iterator[None]:
        """Use the adapters that a batch names, for the body."""
        rows = batch.adapters
        with self._lock:
            self._rows = rows
            if rows is not None:
                ends = batch.ends
                self._end_rows = None if ends is None else rows[ends]
            try:
                yield
            finally:
                self._rows = self._end_rows = None


def add_to(add: Any, *call: Any) -> None:
    """Call the method of an Adapters that still exists."""
    if add is not None:
        add(*call)
