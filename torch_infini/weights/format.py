"""Format: how the weight of a linear layer is stored as integers, and the operations on it.

A module of this package defines one as FORMAT, or several as FORMATS; layers of models use quantized weights only
through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Integers(NamedTuple):
    """The stored tensors of a weight [n, k]; None: the format has none of that name."""

    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def rows(self) -> int:
        """n, but for weights in panels without scales, whose panels it counts; scales are never stored together."""
        return len(self.weight if self.scales is None else self.scales)

    def rows_of(self, format: Format) -> int:
        """Return n of a weight in a format."""
        return self.rows * (format.panel if self.scales is None else 1)


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor, and how many rows and columns of the weight an element of its first and second
    dimension stands for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int = 1
    rows: int = 1


class Format(ABC):
    """One format.

    Attributes:
        name: In files, and nn.Linear's format.
        serves: The `weights=` name that this format and its alternatives serve; empty: only checkpoints have it.
        exact: The `weights=` name of this format alone; empty: its name.
        order: The priority among formats with the same `serves`, if several can quantize.
        groups: The group sizes that a file may name, preferred ones first; (0,) if there is no choice.
        op: The op of torch.ops.infini that multiplies by it; empty: linear_ and the name.
        panel: Rows that are stored together. Weights can be concatenated if all but the last have a multiple of it.
        serves_experts: Whether infini::fused_experts takes weights of the format.
    """

    name: str
    serves: str
    exact: str = ""
    order: int = 0
    op: str = ""
    groups: tuple[int, ...] = (0,)
    panel: int = 1
    serves_experts: bool = False

    def serves_on(self, device: torch.device) -> bool:
        """Return whether a device has kernels for the product."""
        return True

    def quantizes_on(self, device: torch.device) -> bool:
        """Return whether weights on a device can be quantized to the format; others must already be quantized."""
        return self.serves_on(device)

    def group(self, k: int) -> int:
        """Return the group for rows of k columns; ValueError with the rule if none fits."""
        return self.groups[0]

    @abstractmethod
    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return the specs of a weight's tensors, by their names in Integers; dtype: that of activations."""

    @abstractmethod
    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        """Quantize rows of a full-precision weight [m, k] to rows from first_row on.

        Raises:
            ValueError: If the weight holds infinity or NaN, or the device has no kernels for it.
        """

    @abstractmethod
    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in full precision: [rows, k], a copy."""

    @abstractmethod
    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        """Multiply the rows of x [..., k] by the transposed weight, and add the bias.

        The engine records its decode steps, which may only contain ops of torch.ops.infini and views.

        Args:
            x: Activations.
            by: The weight.
            bias: [n], or None.
            same_bits: Whether a row's bits must not depend on the other rows.
            out: [..., n], written and returned; None: a new tensor.
        """

    def put(self, some: Tensor, first: int, to: Tensor, row: int, rows: int) -> None:
        """Copy rows of one of the weight's tensors, from `first` on, to another tensor's rows from `row` on.

        Threads may copy different rows at the same time.
        """
        to[row : row + rows].copy_(some[first : first + rows])

    def empty(
        self,
        n: int,
        k: int,
        group: int,
        dtype: torch.dtype,
        new: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> Integers:
        """Allocate the tensors of a weight by new(shape, dtype)."""
        return Integers(**{name: new(kind.shape, kind.dtype) for name, kind in self.kinds(n, k, group, dtype).items()})
