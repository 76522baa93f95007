"""Slots of a model's layers: where the tensors of a checkpoint go, of which a rank has some rows or columns.

Projections says which tensors one linear layer concatenates; its slots are dense or, as stored, of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from ..checkpoints import Projection, StoredLayer
from ..nn import Linear, MergedLinear
from ..weights import FORMATS, Format, TensorSpec
from .checkpoint import Shard, Slot


class Share(NamedTuple):
    """A rank's share of the rows or columns of a tensor: `number` of the `whole`, from `first` on."""

    whole: int
    first: int
    number: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.number)

    def times(self, size: int) -> Share:
        """Return the share in rows or columns, if each item has `size` of them."""
        return Share(self.whole * size, self.first * size, self.number * size)


class Projections(NamedTuple):
    """A linear layer and the projections that it concatenates, with this rank's rows and columns of each."""

    prefix: str
    parent: nn.Module
    attribute: str
    parts: dict[str, Share]
    columns: Share

    @property
    def linear(self) -> Linear | MergedLinear:
        linear: Linear | MergedLinear = getattr(self.parent, self.attribute)
        return linear

    def projections(self) -> list[Projection]:
        columns = self.columns.span
        return [Projection(f"{self.prefix}{name}", shard.span, columns) for name, shard in self.parts.items()]


def rows_slot(data: Tensor, rows: Share) -> Slot:
    """Return the slot of a parameter that holds these rows of a tensor."""

    def load(some: Tensor, first: int) -> None:
        data[first : first + some.shape[0]].copy_(some)

    return Slot((rows.whole, *data.shape[1:]), data, load, lambda: data, Shard(rows.first, rows.number))


def parameter_slot(parameter: nn.Parameter) -> Slot:
    size = parameter.shape[0]
    return rows_slot(parameter.data, Share(size, 0, size))


def with_copy(slot: Slot, load: Callable[[Tensor, int], None]) -> Slot:
    """Return a slot that also passes the tensor's rows to another `load`."""

    def load_both(rows: Tensor, first: int) -> None:
        slot.load(rows, first)
        load(rows, first)

    return slot._replace(place=None, load=load_both)


def _integer_slots(
    name: str, linear: Linear, first: int, shard: Share, columns: Share, stored: StoredLayer
) -> dict[str, Slot]:
    """Return the slots of a quantized projection, which is in the Linear's rows from `first` on."""
    if linear.format != stored.format:
        raise ValueError(
            f"torch_infini.models.Llama: the format of {name} must be the checkpoint's, {stored.format}, got "
            f"{linear.format}"
        )
    format = FORMATS[stored.format]
    kinds = format.kinds(shard.whole, columns.whole, stored.group, linear.dtype)

    def slot(data: Tensor, kind: TensorSpec) -> Slot:
        """Return one tensor's slot. Rows of other ranks in the same panel of the file are read and discarded."""
        begin = shard.first // kind.rows
        rows = -(-(shard.first + shard.number) // kind.rows) - begin

        def load(some: Tensor, row: int) -> None:
            there = (begin + row) * kind.rows  # in the whole projection
            low, high = max(there, shard.first), min(there + len(some) * kind.rows, shard.first + shard.number)
            format.put(some, low - there, data, first + low - shard.first, high - low)

        together = shard.first % kind.rows == first % kind.rows == shard.number % kind.rows == 0
        place = data[first // kind.rows :][:rows] if together else None
        part = Shard(begin, rows)
        if len(kind.shape) > 1:
            end = columns.first + columns.number
            if columns.first % kind.columns or (end % kind.columns and end < columns.whole):
                raise ValueError(
                    f"torch_infini.models.Llama: ranks must not cut the groups of {kind.columns} numbers of {name}, "
                    f"got {columns.number} columns of each: use another tensor_parallel_size"
                )
            part = Shard(begin, rows, columns.first // kind.columns, data.shape[1])
        read = partial(_rows_of_integers, format, kind, data, first, shard.number)
        return Slot(kind.shape, place, load, read, part, None if kind.dtype.is_floating_point else kind.dtype)

    tensors = linear.integers._asdict()
    suffixes = {"weight": "weight_integers", "scales": "weight_scales", "zeros": "weight_zeros"}
    return {f"{name}.{suffixes[field]}": slot(tensors[field].data, kind) for field, kind in kinds.items()}


def _rows_of_integers(format: Format, kind: TensorSpec, data: Tensor, first: int, rows: int) -> Tensor:
    """Return rows of a tensor of a quantized Linear, in the layout of checkpoints."""
    there = data.new_zeros(-(-rows // kind.rows), *data.shape[1:])
    format.put(data, first, there, 0, rows)
    return there


def _load_rows(linear: Linear | MergedLinear, first: int, some: Tensor, row: int) -> None:
    """Load rows of a projection that begins at row `first` of a Linear."""
    linear.load(some, first + row)


def linear_slots(
    stored: Mapping[str, StoredLayer],
    prefix: str,
    linear: Linear | MergedLinear,
    parts: dict[str, Share],
    columns: Share,
) -> dict[str, Slot]:
    """Return the slots of the projections that a Linear concatenates, for these rows and columns of each."""
    slots: dict[str, Slot] = {}
    first = 0
    for name, shard in parts.items():
        rows = slice(first, first + shard.number)
        if f"{prefix}{name}" in stored:
            assert isinstance(linear, Linear)
            slots |= _integer_slots(f"{prefix}{name}", linear, first, shard, columns, stored[f"{prefix}{name}"])
        else:
            slots[f"{prefix}{name}.weight"] = Slot(
                (shard.whole, columns.whole),
                linear.weight.data[rows] if isinstance(linear, Linear) and linear.format == "dense" else None,
                partial(_load_rows, linear, first),
                partial(linear.dense, rows),
                Shard(shard.first, shard.number, columns.first, columns.number),
            )
        if linear.bias is not None:
            # If the columns are sharded, the all-reduce must add the bias once: only rank 0 has it.
            mine = shard if columns.first == 0 else shard._replace(number=0)
            slots[f"{prefix}{name}.bias"] = rows_slot(linear.bias.data[first : first + mine.number], mine)
        first += shard.number
    return slots
