"""SequenceStates: what layers without keys and values keep of each sequence, as linear attention does.

A sequence has one row in every tensor, however long it is; its keys and values, if any, are in a KVCache beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class StateShape(NamedTuple):
    """A sequence's state in one place of a model.

    Attributes:
        sizes: Without the dimension of sequences.
        dtype: Of its numbers.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class SequenceStates:
    """A tensor [rows, *sizes] for each shape; zeros are the state of an empty sequence.

    Args:
        shapes: In the order in which the model computes them.
        rows: The number of sequences.
        device: Of the tensors.

    Attributes:
        tensors: One for each shape.
    """

    def __init__(self, shapes: Sequence[StateShape], rows: int, device: torch.device | str = "cpu") -> None:
        # The memory of zeros is not taken before it is written, so that rows without a sequence cost nothing.
        self.tensors = [torch.zeros(rows, *shape.sizes, dtype=shape.dtype, device=device) for shape in shapes]

    def reset(self, rows: Sequence[int]) -> None:
        """Make rows those of empty sequences."""
        for row in rows:
            for tensor in self.tensors:
                tensor[row].zero_()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows, one pair (from, to) after the other."""
        for source, target in pairs:
            for tensor in self.tensors:
                tensor[target].copy_(tensor[source])
