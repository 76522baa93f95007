"""Cut: the part of a tensor that a rank holds; Part: that of a linear layer's weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

NAME = "torch_infini.LLM"
_PART = "_infini_part"  # attribute of a module: its Part


class Range(NamedTuple):
    """Entries of a dimension.

    Attributes:
        first: The first one.
        number: How many.
    """

    first: int
    number: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.number)

    def times(self, size: int) -> Range:
        """Return the range of numbers, if each entry stands for `size` of them."""
        return Range(self.first * size, self.number * size)

    def after(self, count: int) -> Range:
        """Return the range behind `count` more entries."""
        return Range(self.first + count, self.number)


class Cut(NamedTuple):
    """The part of a tensor that a rank holds.

    Attributes:
        dim: The dimension that is cut, negative.
        ranges: Its entries; none: the tensor is zeros, for another rank has it whole.
    """

    dim: int
    ranges: tuple[Range, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor, a view if it is one range."""
        parts = [tensor.narrow(self.dim, first, number) for first, number in self.ranges]
        return torch.zeros_like(tensor) if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_blocks(self, blocks: Tensor, elements: int, transposed: bool) -> Tensor:
        """Return the part of experts' weights [experts, n, k / elements, bytes]; `dim` is of [experts, n, k], or, if
        transposed, of [experts, k, n]; -3: whole experts.

        Raises:
            ValueError: If ranks would have parts of a block.
        """
        if self.dim == -3:
            return Cut(-4, self.ranges).of(blocks)
        if (self.dim == -1) == transposed:
            return Cut(-3, self.ranges).of(blocks)
        if any(first % elements or number % elements for first, number in self.ranges):
            raise ValueError(
                f"{NAME}: ranks must not cut the blocks of {elements} numbers, got {self.ranges[0].number} columns of "
                "each: use another tensor_parallel_size"
            )
        return Cut(-2, tuple(Range(first // elements, number // elements) for first, number in self.ranges)).of(blocks)


class Part(NamedTuple):
    """The part of a linear layer's weight that a rank holds.

    Attributes:
        rows: Of the weight [n, k].
        columns: Likewise.
        shape: (n, k) of the whole weight.
    """

    rows: tuple[Range, ...]
    columns: Range
    shape: tuple[int, int]


def part_of(module: nn.Module) -> Part | None:
    """Return the part of a linear layer that this rank has; None for one that is whole."""
    part: Part | None = vars(module).get(_PART)
    return part


def set_part(module: nn.Linear, part: Part) -> None:
    """Note a layer's part, and its sizes."""
    vars(module)[_PART] = part
    module.out_features, module.in_features = sum(number for _, number in part.rows), part.columns.number
