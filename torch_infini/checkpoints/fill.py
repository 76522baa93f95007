"""fill: reads a checkpoint into a model, each tensor once, in the layers and places that the model names.

The pages of a layer's file are dropped before the next: no more than one is held beside the model's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .reader import Checkpoint
from .weight import LinearWeight

_ROWS = 1024  # of a table that are dequantized at a time; a multiple of 32


class Projection(NamedTuple):
    """A linear layer of a checkpoint, and the rows and columns of its weight that the model has."""

    name: str
    rows: slice
    columns: slice


class Layer(NamedTuple):
    """A linear layer of a model.

    Attributes:
        projections: Its layers in the checkpoint, one below the other.
        put: Takes their weights, of the model's rows and columns, in memory that may be the file's; None for a
            projection that is not quantized, whose tensor comes later.
    """

    projections: Sequence[Projection]
    put: Callable[[list[LinearWeight | None]], None]


class Place(Protocol):
    """Where a model has a tensor, or its rows and columns of one."""

    @property
    def load(self) -> Callable[[Tensor, int], None]:
        """Takes some of the rows here, in any floating dtype, and the index of the first."""

    @property
    def first_row(self) -> int:
        """The first of the tensor's rows that are here."""

    @property
    def rows(self) -> int:
        """How many are here."""

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that is here."""


def fill(
    checkpoint: Checkpoint, dtype: torch.dtype, layers: Iterable[Layer], places: Callable[[], Mapping[str, Place]]
) -> Iterator[None]:
    """Read a checkpoint that fits the model (Checkpoint.check_model); yields after each layer and each place.

    Args:
        checkpoint: Open.
        dtype: Of activations.
        layers: The model's linear layers that may be quantized.
        places: Called once all layers are put: where the other tensors go, by name. The weight of a quantized layer
            is dequantized, unless it was put.
    """
    done = set()

    def read(one: Projection) -> LinearWeight | None:
        if one.name not in checkpoint.layers:
            return None
        done.add(one.name)
        return checkpoint.weight(one.name, dtype, one.rows, one.columns)

    for layer in layers:
        layer.put([read(one) for one in layer.projections])
        for one in layer.projections:
            if one.name in done:
                checkpoint.release(one.name)
        yield
    for name, place in places().items():
        layer_name = name.removesuffix(".weight")
        if layer_name not in checkpoint.layers:
            with checkpoint.read(name) as (tensor,):
                place.load(place.cut(tensor), 0)
        elif layer_name not in done:
            _fill_table(checkpoint, layer_name, place, dtype)
        yield


def _fill_table(checkpoint: Checkpoint, name: str, place: Place, dtype: torch.dtype) -> None:
    whole, first, rows = checkpoint.layers[name].n, place.first_row, place.rows
    for begin in range(first // _ROWS * _ROWS, first + rows, _ROWS):
        values = checkpoint.dequantize(name, begin, min(_ROWS, whole - begin))
        low, high = max(first - begin, 0), min(first + rows - begin, _ROWS)
        place.load(values[low:high].to(dtype), max(begin - first, 0))
