"""fill: reads a checkpoint into a model, each tensor once, by the layers and destinations that the model lists.

The file's pages of one layer are dropped before the next is read, so that at most one layer is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .reader import Checkpoint
from .weight import LinearWeight

_ROWS = 1024  # rows of a table that are dequantized at a time; a multiple of 32


class Projection(NamedTuple):
    """A linear layer of a checkpoint, and the rows and columns of its weight that the model has."""

    name: str
    rows: slice
    columns: slice


class Layer(NamedTuple):
    """A linear layer of a model.

    Attributes:
        projections: Its layers in the checkpoint, concatenated along the rows.
        put: Takes their weights, cut to the model's rows and columns, in memory that may be the file's; None for a
            projection that is not quantized, whose tensor `fill` loads later.
    """

    projections: Sequence[Projection]
    put: Callable[[list[LinearWeight | None]], None]


class Destination(Protocol):
    """A tensor of a model, or a rank's shard of it, to load from a checkpoint."""

    @property
    def load(self) -> Callable[[Tensor, int], None]:
        """Takes some rows of the destination, in any floating dtype, and the index of the first."""

    @property
    def first_row(self) -> int:
        """The first of the whole tensor's rows that belong to the destination."""

    @property
    def rows(self) -> int:
        """The number of these rows."""

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole tensor that belongs to the destination."""


def fill(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    layers: Iterable[Layer],
    destinations: Callable[[], Mapping[str, Destination]],
    device: torch.device | str = "cpu",
) -> Iterator[None]:
    """Read a checkpoint that fits the model (Checkpoint.check_model); yield after each layer and each destination.

    Args:
        checkpoint: An open checkpoint.
        dtype: The dtype of activations.
        layers: The model's linear layers that may be quantized.
        destinations: Called after all layers are put; returns the other tensors of the model by name. The weight of a
            quantized layer is dequantized into its destination, unless the layer was put.
        device: Where the layers will be multiplied.
    """
    done = set()

    def read(one: Projection) -> LinearWeight | None:
        if one.name not in checkpoint.layers:
            return None
        done.add(one.name)
        return checkpoint.weight(one.name, dtype, one.rows, one.columns, device)

    for layer in layers:
        layer.put([read(one) for one in layer.projections])
        for one in layer.projections:
            if one.name in done:
                checkpoint.release(one.name)
        yield
    for name, destination in destinations().items():
        layer_name = name.removesuffix(".weight")
        if layer_name not in checkpoint.layers:
            with checkpoint.read(name) as (tensor,):
                destination.load(destination.cut(tensor), 0)
        elif layer_name not in done:
            _fill_table(checkpoint, layer_name, destination, dtype)
        yield


def _fill_table(checkpoint: Checkpoint, name: str, destination: Destination, dtype: torch.dtype) -> None:
    whole, first, rows = checkpoint.layers[name].n, destination.first_row, destination.rows
    for begin in range(first // _ROWS * _ROWS, first + rows, _ROWS):
        values = checkpoint.dequantize(name, begin, min(_ROWS, whole - begin))
        low, high = max(first - begin, 0), min(first + rows - begin, _ROWS)
        destination.load(values[low:high].to(dtype), max(begin - first, 0))
